"""Rounding at random to a dtype, and its seed."""

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from optax_mp.core._dtypes import saturate, with_derivative_of
from optax_mp.core._random_numbers import uniform_numbers
from optax_mp.core.jax_api import _arrays


def check_seed(seed: Any, caller: str, or_none: str = "", remedy: str = "") -> None:
    """Raise unless `seed` is an integer, or None if `or_none` says what that means."""
    if _arrays.is_array(
        seed
    ):  # where each member of a `vmap`, or each rank, has its own
        is_number = not seed.shape and jnp.issubdtype(seed.dtype, jnp.integer)
    else:
        is_number = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not is_number and not (or_none and seed is None):
        shown = _arrays.describe(seed) if _arrays.is_array(seed) else repr(seed)
        raise TypeError(
            f"{caller}: expected `seed` to be an integer{or_none}, got {shown}{remedy}."
        )


def round_stochastically(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Round `x` up or down to a neighbour in a floating `dtype` of 16 bits or less.

    The nearer neighbour is more likely, so that the expectation is `x`. Values that
    `dtype` can represent stay, and so do infinities and NaN. Finite values beyond its
    range become its largest one.

    Returns:
        The rounded values, in float32. For derivatives rounding is the identity.
    """
    exact = x
    x = saturate(lax.convert_element_type(lax.stop_gradient(x), jnp.float32), dtype)
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
    return with_derivative_of(lax.select(is_rounded, rounded, x), exact)
