"""Reproducible random numbers, for rounding at random.

A number is a hash of seed, step, array and position: the same in every run and, under
`jit`, on any number of devices. A hash takes a few integer operations that fuse with
the rounding, whereas `jax.random` would write all of its numbers to memory first.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp.core.jax_api import _arrays


def rounding_keys(count: int, *parts: int | jax.Array) -> list[jax.Array]:
    """Return a key for each of `count` arrays, from a seed, a step and so on.

    Args:
        count: how many keys.
        parts: what they depend on: integers, plain or `[]`.

    Returns:
        The keys, each uint32 `[1]`. All are parts of one array `[count]`: XLA would
        compile a loop for each key that is computed by itself, which takes seconds.
    """
    numbers = [
        part.astype(jnp.uint32)
        if isinstance(part, jax.Array)
        else np.uint32(int(part) % 2**32)
        for part in parts
    ]
    return _rounding_keys(count, *numbers) if count else []


@partial(jax.jit, static_argnums=0)
def _rounding_keys(count: int, *parts: jax.Array) -> list[jax.Array]:
    keys = _hash(lax.iota(jnp.uint32, count))
    for part in parts:
        # The factor makes (1, 2) and (2, 1) differ.
        keys = _hash(keys * jnp.uint32(31) + part)
    keys = lax.optimization_barrier(keys)
    # One equation for all of them: indexing would trace several for each key. They are
    # computed apart from the loops over each array: if each loop sliced its own key, no
    # two would be equal, and XLA for CPUs would compile each, also those of one shape.
    return list(map(_arrays.computed_once, lax.split(keys, [1] * count)))


def uniform_numbers(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return random numbers from [0, 1), multiples of 2^-24.

    Args:
        shape: the shape of the result, `[...]`.
        key: uint32 `[]` or `[1]`.

    Returns:
        float32 `[...]`.
    """
    # Only `lax`, because this is traced for each shape of a leaf: `jax.numpy` takes
    # five times as long.
    last = len(shape) - 1
    positions = lax.broadcasted_iota(jnp.uint32, shape, last) if shape else np.uint32(0)
    for axis in reversed(range(last)):
        place = lax.broadcasted_iota(jnp.uint32, shape, axis)
        stride = math.prod(shape[axis + 1 :]) % 2**32
        positions = lax.add(positions, lax.mul(place, np.uint32(stride)))
    numbers = _hash(lax.bitwise_xor(positions, lax.reshape(key, ())))
    bits = lax.shift_right_logical(numbers, np.uint32(8))
    # As signed numbers, which all hardware converts to floats in one operation.
    signed = lax.bitcast_convert_type(bits, jnp.int32)
    return lax.mul(lax.convert_element_type(signed, jnp.float32), np.float32(2.0**-24))


def _hash(x: jax.Array) -> jax.Array:
    """Hash uint32 `[...]`: one flipped bit of the input flips half of the output bits.

    Constants: Christopher Wellons' hash prospector, found by search for least bias,
    https://github.com/skeeto/hash-prospector
    """
    x = lax.mul(_mix(x, 16), np.uint32(0x21F0AAAD))
    x = lax.mul(_mix(x, 15), np.uint32(0xD35A2D97))
    return _mix(x, 15)


def _mix(x: jax.Array, shift: int) -> jax.Array:
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift)))
