"""How an array is cut over mesh axes: along which dimensions, and over which axes."""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_mp._jax._arrays import has_explicit_axes
from optax_mp._jax._memory import HOST_KIND, is_on_host

# The names of the mesh axes over which one dimension of an array is sharded.
MeshAxes = tuple[str, ...]
# Those of each dimension; None for a dimension that is not cut.
AxesByDim = tuple[MeshAxes | None, ...]


class Cut(NamedTuple):
    """How an array is sharded before it is cut, and after.

    Attributes:
        whole: the axes over which the whole array is sharded.
        part: the same axes, and those that it is cut over.
    """

    whole: AxesByDim
    part: AxesByDim


def choose_cut(
    mesh: Mesh, axes: MeshAxes, shape: tuple[int, ...], spec: PartitionSpec
) -> Cut | None:
    """Return the cut over each mesh axis, along the first dimension that it divides.

    Args:
        mesh: the mesh.
        axes: the mesh axes to cut over.
        shape: the shape of the array.
        spec: how the array is sharded now.

    Returns:
        The cut; None if no dimension divides, or if the array is sharded over one of
        `axes` already.
    """
    whole = [axis_names(spec, dim) for dim in range(len(shape))]
    # Sharded over data parallelism already (FSDP): there is nothing left to save.
    if any(name in names for names in whole for name in axes):
        return None
    part = list(whole)
    for name in axes:
        # The first dimension that divides, because its parts are contiguous.
        for dim, size in enumerate(shape):
            if size and size % _shard_count(mesh, (*part[dim], name)) == 0:
                part[dim] = (*part[dim], name)
                break
    if part == whole:
        return None
    is_cut = [after != before for after, before in zip(part, whole, strict=True)]

    def where_cut(by_dim: list[MeshAxes]) -> AxesByDim:
        return tuple(
            names if cut else None for names, cut in zip(by_dim, is_cut, strict=True)
        )

    return Cut(where_cut(whole), where_cut(part))


def divides(mesh: Mesh, by_dim: AxesByDim, shape: tuple[int, ...]) -> bool:
    """Return whether these mesh axes divide each dimension of a shape."""
    sizes = zip(by_dim, shape, strict=True)
    return all(size % _shard_count(mesh, names or ()) == 0 for names, size in sizes)


def axis_names(spec: PartitionSpec, dim: int) -> MeshAxes:
    """Return the mesh axes over which a spec shards one dimension."""
    entry = tuple(spec)[dim] if dim < len(spec) else None
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shard(x: jax.Array, mesh: Mesh, by_dim: AxesByDim) -> jax.Array:
    """Shard an array over these mesh axes; a dimension with None stays as it is."""
    # With explicit axes the type of the array says how a dimension is sharded now. With
    # automatic ones only XLA knows.
    if has_explicit_axes(mesh):
        known = tuple(jax.typeof(x).sharding.spec)
        current: list[Any] = [*known, *[None] * (x.ndim - len(known))]
    else:
        current = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec = PartitionSpec(
        *(
            unchanged if names is None else names or None
            for names, unchanged in zip(by_dim, current, strict=True)
        )
    )
    # An array that `offload` keeps in host memory stays there.
    kind = {"memory_kind": HOST_KIND} if is_on_host(x) else {}
    sharding = NamedSharding(mesh, spec, **kind)
    if has_explicit_axes(mesh):
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def _shard_count(mesh: Mesh, names: MeshAxes) -> int:
    return math.prod(mesh.shape[name] for name in names)
