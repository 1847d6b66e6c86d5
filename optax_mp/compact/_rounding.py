"""Stochastic rounding to a narrower float."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import saturate
from optax_mp.compact._random_numbers import uniform_numbers


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
    # With `lax` alone: see `uniform_numbers`.
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        # bfloat16 is the upper half of float32. The lower half is the fraction that is
        # rounded, and a carry into the exponent is what rounding up to the next power
        # of two needs.
        unit = 1 << (23 - info.nmant)
        below, rest = (
            lax.bitwise_and(pattern, mask) for mask in np.int32([-unit, unit - 1])
        )
        rest = lax.convert_element_type(rest, jnp.float32)
        rises = lax.convert_element_type(
            lax.lt(lax.mul(numbers, np.float32(unit)), rest), jnp.int32
        )
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
    is_rounded = lax.bitwise_and(lax.is_finite(x), lax.ne(x, np.float32(0)))
    return lax.select(is_rounded, rounded, x)
