"""How an array is cut over mesh axes."""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_mp._jax._arrays import has_explicit_axes

# The names of the mesh axes over which one dimension of an array is sharded.
Names = tuple[str, ...]


class Cut(NamedTuple):
    """The mesh axes of each dimension, or None for a dimension that is not cut.

    Attributes:
        whole: the axes over which the whole array is sharded.
        part: the axes over which the parts are sharded.
    """

    whole: tuple[Names | None, ...]
    part: tuple[Names | None, ...]


def choose_cut(
    mesh: Mesh, axes: Names, shape: tuple[int, ...], spec: PartitionSpec
) -> Cut | None:
    """Return the cut over each mesh axis along the first dimension that it divides.

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
    # Sharded over data parallelism already (FSDP): nothing is left to save.
    if any(name in names for names in whole for name in axes):
        return None
    part = list(whole)
    for name in axes:
        # The first dimension that divides, because its parts are contiguous.
        for dim, size in enumerate(shape):
            if size and size % _count(mesh, (*part[dim], name)) == 0:
                part[dim] = (*part[dim], name)
                break
    if part == whole:
        return None
    is_cut = [after != before for after, before in zip(part, whole, strict=True)]

    def where_cut(by_dim: list[Names]) -> tuple[Names | None, ...]:
        return tuple(
            names if cut else None for names, cut in zip(by_dim, is_cut, strict=True)
        )

    return Cut(where_cut(whole), where_cut(part))


def divides(
    mesh: Mesh, by_dim: tuple[Names | None, ...], shape: tuple[int, ...]
) -> bool:
    """Return whether these mesh axes divide each dimension of a shape."""
    sizes = zip(by_dim, shape, strict=True)
    return all(size % _count(mesh, names or ()) == 0 for names, size in sizes)


def axis_names(spec: PartitionSpec, dim: int) -> Names:
    """Return the mesh axes over which a spec shards one dimension."""
    entry = tuple(spec)[dim] if dim < len(spec) else None
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _count(mesh: Mesh, names: Names) -> int:
    return math.prod(mesh.shape[name] for name in names)


def shard(x: jax.Array, mesh: Mesh, by_dim: tuple[Names | None, ...]) -> jax.Array:
    """Shard an array over these mesh axes; a dimension with None stays as it is."""
    # Under automatic sharding only XLA knows how a dimension is sharded now; with
    # explicit axes the type of the array says it.
    if has_explicit_axes(mesh):
        known = tuple(jax.typeof(x).sharding.spec)
        now: list[Any] = [*known, *[None] * (x.ndim - len(known))]
    else:
        now = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec = PartitionSpec(
        *(
            before if names is None else names or None
            for names, before in zip(by_dim, now, strict=True)
        )
    )
    if has_explicit_axes(mesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
