"""Reproducible random numbers, as a hash of seed, step, array and position.

The same in every run and, under `jit`, on any number of devices. They take a few
integer operations that fuse with the rounding, where `jax.random` would write all of
its numbers to memory first.
"""

import math
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._by_platform import by_platform


def rounding_keys(count: int, *parts: int | jax.Array) -> jax.Array:
    """Return a uint32 key for each of `count` arrays, from a seed, a step and so on.

    The keys come as one sorted array, although their order does not matter: XLA then
    computes them before anything else. One scalar per array becomes one kernel per
    array, and seconds of compilation.
    """
    keys = _hash(lax.iota(jnp.uint32, count))
    for part in parts:
        if isinstance(part, jax.Array):
            part = part.astype(jnp.uint32)
        else:
            part = jnp.uint32(int(part) % 2**32)
        # The factor makes (1, 2) and (2, 1) differ.
        keys = _hash(keys * jnp.uint32(31) + part)
    return lax.sort(keys)


@jax.jit
def split_keys(keys: jax.Array) -> list[jax.Array]:
    """Return the keys of `rounding_keys` one by one, each an array of one element."""
    return by_platform(_split, {}, {"cpu": _look_up}, keys) if len(keys) else []


def _split(keys: jax.Array) -> list[jax.Array]:
    # One equation for all of them: indexing would trace several for each key.
    return list(lax.split(keys, [1] * len(keys)))


def _look_up(device_count: int, keys: jax.Array) -> list[jax.Array]:
    """Split the keys so that kernels for CPUs do not contain the place of a key.

    XLA compiles kernels that are equal once, but writes into each the constants that it
    knows. It does not know these places: they depend on a condition, which always holds
    because the keys are sorted.
    """
    count = len(keys)
    places = lax.cond(
        keys[0] <= keys[-1],
        lambda: [jnp.int32(i) for i in range(count)],
        lambda: [jnp.int32(0)] * count,
    )
    return [lax.dynamic_slice(keys, (place,), (1,)) for place in places]


def check_seed(seed: Any, caller: str, *, or_none: bool = True) -> None:
    """Raise unless `seed` is an integer, or None where that is allowed."""
    if isinstance(seed, Integral) or (or_none and seed is None):
        return
    expected = "an integer" + (", or None to round to nearest" if or_none else "")
    raise TypeError(f"{caller}: `seed` is {seed!r}, expected {expected}.")


def uniform_numbers(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return float32 numbers from [0, 1), multiples of 2^-24.

    Args:
        shape: of the result.
        key: a uint32 scalar, or an array of one element.
    """
    positions = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        positions += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    bits = _hash(positions ^ key.reshape(())) >> 8
    # As signed numbers, which all hardware converts to floats in one operation.
    return lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * 2.0**-24


def _hash(x: jax.Array) -> jax.Array:
    """Hash uint32 numbers: each bit of the input flips half of the output bits.

    Constants: Christopher Wellons' hash prospector, found by search for least bias,
    https://github.com/skeeto/hash-prospector
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
