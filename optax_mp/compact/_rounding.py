"""Stochastic rounding to a narrower float."""

import jax
import jax.numpy as jnp
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
    x = saturate(x.astype(jnp.float32), dtype)
    info = jnp.finfo(dtype)
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        # bfloat16 is the upper half of float32. The lower half is the fraction that is
        # rounded, and a carry into the exponent is what rounding up to the next power
        # of two needs.
        unit = 1 << (23 - info.nmant)
        below, rest = pattern & -unit, (pattern & (unit - 1)).astype(jnp.float32)
        rises = uniform_numbers(x.shape, key) * unit < rest
        rounded = lax.bitcast_convert_type(below + unit * rises, jnp.float32)
    else:
        # Other exponents, and fewer of them: round a multiple of the spacing of `dtype`
        # near `x`, which is constant below its smallest normal number.
        power = lax.bitcast_convert_type(pattern & 0x7F800000, jnp.float32)
        spacing = jnp.maximum(power, float(info.smallest_normal)) * float(info.eps)
        multiple = x / spacing
        below = jnp.floor(multiple)
        rises = uniform_numbers(x.shape, key) < multiple - below
        rounded = (below + rises) * spacing
    return jnp.where(jnp.isfinite(x) & (x != 0), rounded, x)
