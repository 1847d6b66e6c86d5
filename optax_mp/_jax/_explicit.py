"""Shardings in the types of arrays, and those that a function asks for its outputs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._jax._arrays import (
    has_explicit_axes,
    is_traced,
    mesh_in_type,
    sharding_in_type,
)
from optax_mp._jax._dataflow import follow
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, open_jaxpr
from optax_mp._jax._place_like import NAME as PLACE_LIKE

# The names of the mesh axes over which one axis of an array is sharded.
MeshAxes = tuple[str, ...]


def whole_along(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Return `x`, not sharded along `axis` unless each part has whole blocks.

    If the type of an array has its sharding, JAX refuses to reshape it into blocks that
    lie on several devices.
    """
    sharding = sharding_in_type(x)
    if sharding is None or fits_blocks(sharding, axis, x.shape[axis], size):
        return x
    return jax.sharding.reshard(x, without_axis(sharding, axis))


def reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` with the sharding in the type of `like`, if it has one."""
    sharding = sharding_in_type(like)
    if sharding is None or sharding_in_type(x) == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def constant_like(x: jax.Array, value: Any) -> jax.Array:
    """Return what `lax.full_like` does, which takes four times as long to trace."""
    # Elsewhere it has to be on the devices of `x`, or sharded as the type of `x` says.
    if not is_traced(x) or has_explicit_axes(mesh_in_type(x)):
        return lax.full_like(x, value)
    return lax.broadcast_in_dim(np.array(value, x.dtype), x.shape, ())


def on_mesh_of(arrays: Iterable[jax.Array], x: jax.Array) -> jax.Array:
    """Return `x`, not sharded, on the mesh in the type of an array, if one has it."""
    for sharding in filter(None, map(sharding_in_type, arrays)):
        return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
    return x


def reshard_beside(x: jax.Array, stored: Any) -> jax.Array:
    """Return `x` with the sharding in the type of an array of its shape in `stored`."""
    if not isinstance(x, jax.Array):
        return x
    alike = [y for y in jax.tree.leaves(stored) if y.shape == x.shape]
    return reshard_like(x, alike[0]) if alike else x


def axis_names(spec: PartitionSpec, axis: int) -> MeshAxes:
    """Return the mesh axes over which a spec shards one axis of an array."""
    entry = tuple(spec)[axis] if axis < len(spec) else None
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shard_count(mesh: Any, names: MeshAxes) -> int:
    """Return how many shards these mesh axes make."""
    return math.prod(mesh.shape[name] for name in names)


def fits_blocks(sharding: NamedSharding, axis: int, length: int, size: int) -> bool:
    """Return whether each device has whole blocks of an array's axis."""
    devices = shard_count(sharding.mesh, axis_names(sharding.spec, axis))
    return devices == 1 or length % (devices * size) == 0


def without_axis(sharding: NamedSharding, axis: int) -> NamedSharding:
    """Return a sharding that leaves one axis of an array whole."""
    spec = [*sharding.spec, *[None] * (axis + 1 - len(sharding.spec))]
    spec[axis] = None
    return sharding.update(spec=PartitionSpec(*spec))


# Equations whose outputs are their inputs, in the same order.
_HAND_ON = {"copy", "copy_p", "device_put", "optimization_barrier", PLACE_LIKE}
# The parameter that holds the sharding which an equation asks for.
_ASK = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


def asked_shardings(jaxpr: AnyJaxpr, inputs: Sequence[Any] = ()) -> list[Any]:
    """Return for each output the sharding that the function asks for, or None.

    Args:
        jaxpr: the jaxpr.
        inputs: the same for each input; by default, None.
    """

    def results(equation: Equation, inputs: list[Any]) -> list[Any]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in _ASK:
            return [equation.params[_ASK[name]]]
        if name in ("jit", "pjit"):
            return asked_shardings(equation.params["jaxpr"], inputs)
        return inputs[:count] if name in _HAND_ON else [None] * count

    inputs = inputs or [None] * len(open_jaxpr(jaxpr)[0].invars)
    return follow(jaxpr, inputs, results, lambda _: None)
