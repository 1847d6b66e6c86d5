"""Shardings that are part of the types of arrays, on meshes with explicit axes."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._jax._arrays import sharding_in_type


def whole_along(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Return `x`, not sharded along `axis` unless each part has whole blocks.

    Where a type says how an array is sharded, JAX refuses to reshape it into blocks
    that lie on several devices.
    """
    sharding = sharding_in_type(x)
    if sharding is None or fits_blocks(sharding, axis, x.shape[axis], size):
        return x
    return jax.sharding.reshard(x, without_axis(sharding, axis))


def reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` with the sharding that is in the type of `like`, if one is."""
    sharding = sharding_in_type(like)
    if sharding is None or sharding_in_type(x) == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def reshard_beside(x: jax.Array, stored: Any) -> jax.Array:
    """Return `x` with the sharding in the type of an array of its shape in `stored`."""
    if not isinstance(x, jax.Array):
        return x
    alike = [y for y in jax.tree.leaves(stored) if y.shape == x.shape]
    return reshard_like(x, alike[0]) if alike else x


def fits_blocks(sharding: NamedSharding, axis: int, length: int, size: int) -> bool:
    """Return whether each device has whole blocks of an array's axis."""
    names: Any = (*sharding.spec, *[None] * (axis + 1))[axis] or ()
    names = (names,) if isinstance(names, str) else names
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    return devices == 1 or length % (devices * size) == 0


def without_axis(sharding: NamedSharding, axis: int) -> NamedSharding:
    """Return a sharding that leaves one axis of an array whole."""
    spec = [*sharding.spec, *[None] * (axis + 1 - len(sharding.spec))]
    spec[axis] = None
    return sharding.update(spec=PartitionSpec(*spec))
