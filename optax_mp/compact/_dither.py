"""Rounding up or down by chance, so that it is right on average.

The chance is a hash of the place in the array, the step and a seed: the same in every
run and, under `jit`, on any number of devices. It is a few integer operations that fuse
with what is rounded, where `jax.random` would write all random numbers to memory first.
"""

import math
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import saturate


def chance_keys(count: int, *parts: int | jax.Array) -> jax.Array:
    """Return uint32 keys for `count` arrays, from a seed, a step and what else differs.

    All at once, and sorted, which changes nothing but that XLA computes them before
    anything else: of a scalar for each array it makes a kernel each, for seconds of
    compilation.
    """
    keys = _mixed(lax.iota(jnp.uint32, count))
    for part in parts:
        # Added to a multiple, for (1, 2) and (2, 1) are to differ.
        if isinstance(part, jax.Array):
            part = part.astype(jnp.uint32)
        else:
            part = jnp.uint32(int(part) % 2**32)
        keys = _mixed(keys * jnp.uint32(31) + part)
    return lax.sort(keys)


def check_seed(seed: Any, caller: str, *, or_none: bool = True) -> None:
    """Raise unless `seed` is an integer, or None where rounding to nearest is meant."""
    if isinstance(seed, Integral) or (or_none and seed is None):
        return
    expected = "an integer" + (", or None to round to nearest" if or_none else "")
    raise TypeError(f"{caller}: `seed` is {seed!r}, expected {expected}.")


def chances(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return float32 numbers from 0 to 1 without 1, multiples of 2^-24."""
    places = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        places += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return (_mixed(places ^ key) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def rounded_by_chance(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Round `x` to one of its two neighbours in a floating `dtype` of 16 bits or less.

    Which one is a matter of chance, so that the expectation is `x`; a value of `dtype`
    stays, and so does NaN. What is too large becomes the largest finite value.

    Returns:
        The rounded values, in float32.
    """
    x = saturate(x.astype(jnp.float32), dtype)
    info = jnp.finfo(dtype)
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        # bfloat16: the upper half, and one more where the lower half says so.
        unit = 1 << (23 - info.nmant)
        below, rest = pattern & -unit, (pattern & (unit - 1)).astype(jnp.float32)
        rises = chances(x.shape, key) * unit < rest
        rounded = lax.bitcast_convert_type(below + unit * rises, jnp.float32)
    else:
        power = lax.bitcast_convert_type(pattern & 0x7F800000, jnp.float32)
        spacing = jnp.maximum(power, float(info.smallest_normal)) * float(info.eps)
        multiple = x / spacing
        below = jnp.floor(multiple)
        rounded = (below + (chances(x.shape, key) < multiple - below)) * spacing
    return jnp.where(jnp.isnan(x) | (x == 0), x, saturate(rounded, dtype))


def _mixed(x: jax.Array) -> jax.Array:
    """Return a hash of uint32 numbers; a bit of the input turns half of the output.

    Constants: Christopher Wellons' hash prospector, found by search for least bias,
    https://github.com/skeeto/hash-prospector
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
