"""Stochastic rounding, by reproducible random numbers.

A number is a hash of seed, step, array and position: the same in every run and, under
`jit`, on any number of devices. A hash takes a few integer operations that fuse with
the rounding, whereas `jax.random` would write all of its numbers to memory first.
"""

import math
from functools import partial
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import saturate
from optax_mp._jax._arrays import computed_once
from optax_mp.trees._tree import describe, is_array


def rounding_keys(count: int, *parts: int | jax.Array) -> list[jax.Array]:
    """Return a uint32 key for each of `count` arrays, from a seed, a step and so on.

    Each is an array of one element. All are parts of one array, because one scalar per
    array would be one kernel per array, and take seconds to compile.
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
    # One equation for all of them: indexing would trace several for each key.
    # Computed apart from the loops over each array: a loop that cuts its own key is
    # like no other, and XLA for CPUs compiles each of them, also those of one shape.
    return list(map(computed_once, lax.split(keys, [1] * count)))


def check_seed(seed: Any, caller: str, or_none: str = "", remedy: str = "") -> None:
    """Raise unless `seed` is an integer, or None if `or_none` says what that means."""
    if is_array(seed):  # where each member of a `vmap`, or each rank, has its own
        is_number = not seed.shape and jnp.issubdtype(seed.dtype, jnp.integer)
    else:
        is_number = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not is_number and not (or_none and seed is None):
        shown = describe(seed) if is_array(seed) else repr(seed)
        raise TypeError(
            f"{caller}: expected `seed` to be an integer{or_none}, got {shown}{remedy}."
        )


def uniform_numbers(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return float32 numbers from [0, 1), multiples of 2^-24.

    Args:
        shape: of the result.
        key: a uint32 scalar, or an array of one element.
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
    """Hash uint32 numbers: each bit of the input flips half of the output bits.

    Constants: Christopher Wellons' hash prospector, found by search for least bias,
    https://github.com/skeeto/hash-prospector
    """
    x = lax.mul(_mix(x, 16), np.uint32(0x21F0AAAD))
    x = lax.mul(_mix(x, 15), np.uint32(0xD35A2D97))
    return _mix(x, 15)


def _mix(x: jax.Array, shift: int) -> jax.Array:
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift)))


def round_stochastically(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Round `x` up or down to a neighbour in a floating `dtype` of 16 bits or less.

    The nearer neighbour is more likely, so that the expectation is `x`. Values that
    `dtype` can represent stay, and so do infinities and NaN. Finite values beyond its
    range become its largest one.

    Returns:
        The rounded values, in float32.
    """
    x = saturate(lax.convert_element_type(x, jnp.float32), dtype)
    info = jnp.finfo(dtype)
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    numbers = uniform_numbers(x.shape, key)
    # Only with `lax`: see `uniform_numbers`.
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        # bfloat16 is the upper half of float32, and the lower half is the fraction to
        # round. A carry into the exponent rounds up to the next power of two.
        unit = 1 << (23 - info.nmant)
        below = lax.bitwise_and(pattern, np.int32(-unit))
        rest = lax.bitwise_and(pattern, np.int32(unit - 1))
        rest = lax.convert_element_type(rest, jnp.float32)
        rises = lax.lt(lax.mul(numbers, np.float32(unit)), rest)
        rises = lax.convert_element_type(rises, jnp.int32)
        higher = lax.add(below, lax.mul(rises, np.int32(unit)))
        rounded = lax.bitcast_convert_type(higher, jnp.float32)
    else:
        # Other exponents, and fewer of them: round a multiple of the spacing of `dtype`
        # near `x`, which is constant below its smallest normal number.
        bits = lax.bitwise_and(pattern, np.int32(0x7F800000))
        power = lax.bitcast_convert_type(bits, jnp.float32)
        smallest = np.float32(info.smallest_normal)
        spacing = lax.mul(lax.max(power, smallest), np.float32(info.eps))
        multiple = lax.div(x, spacing)
        below = lax.floor(multiple)
        rises = lax.lt(numbers, lax.sub(multiple, below))
        higher = lax.add(below, lax.convert_element_type(rises, jnp.float32))
        rounded = lax.mul(higher, spacing)
    # Zeros stay, with their signs. They are not compared with 0: see `difference`.
    is_rounded = lax.bitwise_and(lax.is_finite(x), lax.ne(x, lax.neg(x)))
    return lax.select(is_rounded, rounded, x)
