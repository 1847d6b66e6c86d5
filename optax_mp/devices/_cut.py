"""How an array is cut over mesh axes: along which dimensions, and over which axes."""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_flatten_with_path

from optax_mp._jax._arrays import has_explicit_axes, is_traced
from optax_mp._jax._memory import HOST_KIND, is_on_host
from optax_mp._tree import PyTree, describe, spell

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


def specs_of_params(
    paths: list[tuple[Any, ...]], param_specs: PyTree
) -> list[PartitionSpec]:
    """Return the `PartitionSpec` of each param; replicated where none is given.

    Args:
        paths: the path of each param.
        param_specs: a tree of specs or shardings like the params, or a prefix of one.
    """

    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec | Sharding)

    given = tree_flatten_with_path(param_specs, is_leaf=is_spec)[0]
    found: list[PartitionSpec] = [PartitionSpec() for _ in paths]
    for path, spec in given:
        if not is_spec(spec):
            raise TypeError(
                f"zero1: `param_specs` is a {type(spec).__name__} at {spell(path)}, "
                "expected a PartitionSpec or a sharding."
            )
        # A spec stands for all params under its path.
        below = [i for i, param in enumerate(paths) if param[: len(path)] == path]
        if not below and spec is not None:
            raise ValueError(
                f"zero1: `param_specs` is {spec} at {spell(path)}, where `params` has "
                "no leaf; expected a tree like `params`, or a prefix of it."
            )
        if isinstance(spec, Sharding):
            # Only a NamedSharding has a spec.
            spec = getattr(spec, "spec", None)
        for i in below:
            found[i] = spec or PartitionSpec()
    return found


def known_spec(param: jax.Array) -> PartitionSpec | None:
    """Return how a param is sharded, if the array or its type says so."""
    # A traced array has a spec only with explicit sharding.
    if not is_traced(param):
        return getattr(getattr(param, "sharding", None), "spec", None)
    sharding = getattr(jax.typeof(param), "sharding", None)
    if sharding is None or not has_explicit_axes(sharding.mesh):
        return None
    return sharding.spec


def check_spec(spec: PartitionSpec, mesh: Mesh, param: jax.Array, where: str) -> None:
    """Raise unless a spec fits the shape of a param and the mesh."""
    names = {name for dim in range(len(spec)) for name in axis_names(spec, dim)}
    if len(spec) > param.ndim or not names <= set(mesh.axis_names):
        raise ValueError(
            f"zero1: `param_specs` is {spec} for param {where}, which is "
            f"{describe(param)}, expected at most one entry per dimension, with names "
            f"of mesh axes; the mesh has {dict(mesh.shape)}."
        )


def check_on_mesh(param: Any, mesh: Mesh, where: str) -> None:
    """Raise if a concrete array is on other devices than those of the mesh."""
    is_concrete = isinstance(param, jax.Array) and not is_traced(param)
    if not is_concrete or isinstance(mesh, AbstractMesh) or mesh.size == 1:
        return
    sharding = param.sharding
    is_on_mesh = sharding.device_set == set(mesh.devices.flat)
    if isinstance(sharding, NamedSharding):
        is_on_mesh = is_on_mesh and sharding.mesh == mesh
    if not is_on_mesh:
        raise ValueError(
            f"zero1: param {where}, which is {describe(param)}, is on {sharding}, "
            f"expected the mesh given to zero1, {mesh}. Move the params there first: "
            "`jax.device_put(params, NamedSharding(mesh, PartitionSpec()))`."
        )
