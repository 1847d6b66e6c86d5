"""How an array is cut over mesh axes: its dimensions and their axes."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from optax_mp._jax._arrays import (
    HOST_KIND,
    is_on_host,
    is_traced,
    mesh_in_type,
    spec_in_type,
)
from optax_mp._jax._sharding import MeshAxes, axis_names, shard_count
from optax_mp.trees._descriptions import fill_spec
from optax_mp.trees._tree import PyTree, describe, spread_prefix


class Cut(NamedTuple):
    """How an array is sharded before it is cut, and after.

    Attributes:
        whole: how the whole array is sharded; unconstrained along dimensions that are
            not cut.
        part: the same for the array that is cut.
    """

    whole: PartitionSpec
    part: PartitionSpec


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
    whole: list[Any] = [axis_names(spec, dim) for dim in range(len(shape))]
    # Sharded over data parallelism already (FSDP): there is nothing left to save.
    if any(name in names for names in whole for name in axes):
        return None
    part = list(whole)
    for name in axes:
        # The first dimension that divides, because its parts are contiguous.
        for dim, size in enumerate(shape):
            if size and size % shard_count(mesh, (*part[dim], name)) == 0:
                part[dim] = (*part[dim], name)
                break
    if part == whole:
        return None
    # Arrays that are not cut stay as they are. With automatic sharding only XLA knows
    # how.
    pairs, rest = list(zip(whole, part, strict=True)), PartitionSpec.UNCONSTRAINED
    whole = [rest if before == after else before or None for before, after in pairs]
    part = [rest if before == after else after for before, after in pairs]
    return Cut(PartitionSpec(*whole), PartitionSpec(*part))


def divides(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> bool:
    """Return whether the mesh axes of a spec divide each dimension of a shape."""
    sizes = enumerate(shape)
    return all(n % shard_count(mesh, axis_names(spec, dim)) == 0 for dim, n in sizes)


def shard(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Shard an array; a dimension that is unconstrained stays as it is."""
    if mesh.explicit_axes:
        spec = fill_spec(spec, jax.typeof(x).sharding.spec)
    # An array that `offload` keeps in host memory stays there.
    kind = {"memory_kind": HOST_KIND} if is_on_host(x) else {}
    sharding = NamedSharding(mesh, spec, **kind)
    if mesh.explicit_axes:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def specs_of_params(params: PyTree, param_specs: PyTree) -> list[PartitionSpec]:
    """Return the `PartitionSpec` of each param; replicated where `param_specs` is None.

    Args:
        params: the params.
        param_specs: a tree of specs or shardings like the params, or a prefix of one.
    """
    specs = []
    for spec in spread_prefix(params, param_specs, "zero1: `param_specs`"):
        if not isinstance(spec, PartitionSpec | Sharding | None):
            raise TypeError(
                "zero1: expected `param_specs` to hold PartitionSpecs or shardings, "
                f"got {spec!r}."
            )
        # Of shardings, only a NamedSharding has a spec.
        is_spec = isinstance(spec, PartitionSpec)
        specs.append(spec if is_spec else getattr(spec, "spec", PartitionSpec()))
    return specs


def known_spec(param: jax.Array) -> PartitionSpec | None:
    """Return how a param is sharded, if the array or its type says it."""
    # A traced array has a spec only with explicit sharding.
    if not is_traced(param):
        return getattr(getattr(param, "sharding", None), "spec", None)
    return spec_in_type(param) if mesh_in_type(param).explicit_axes else None


def check_spec(spec: PartitionSpec, mesh: Mesh, param: jax.Array, where: str) -> None:
    """Raise unless a spec fits the shape of a param and the mesh."""
    names = {name for dim in range(len(spec)) for name in axis_names(spec, dim)}
    if len(spec) > param.ndim or not names <= set(mesh.axis_names):
        raise ValueError(
            "zero1: expected at most one entry per dimension in `param_specs`, with "
            f"names of mesh axes, got {spec} for param {where}, which is "
            f"{describe(param)}; the mesh has {dict(mesh.shape)}."
        )
