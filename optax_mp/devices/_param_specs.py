"""How params are sharded: as the user says, and as the arrays themselves say."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_flatten_with_path

from optax_mp._jax._arrays import has_explicit_axes, is_traced
from optax_mp._tree import PyTree, describe, spell
from optax_mp.devices._cut import axis_names


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
