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


def rounding_keys(count: int, *parts: int | jax.Array) -> jax.Array:
    """Return a uint32 key for each of `count` arrays, from a seed, a step and so on.

    As one array, which is computed before anything else: one scalar per array would be
    one kernel per array, and seconds of compilation.
    """
    keys = _hash(lax.iota(jnp.uint32, count))
    for part in parts:
        if isinstance(part, jax.Array):
            part = part.astype(jnp.uint32)
        else:
            part = jnp.uint32(int(part) % 2**32)
        # The factor makes (1, 2) and (2, 1) differ.
        keys = _hash(keys * jnp.uint32(31) + part)
    return lax.optimization_barrier(keys)


def split_keys(keys: jax.Array) -> list[jax.Array]:
    """Return the keys of `rounding_keys` one by one, each an array of one element."""
    # One equation for all of them: indexing would trace several for each key.
    return list(lax.split(keys, [1] * len(keys))) if len(keys) else []


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
