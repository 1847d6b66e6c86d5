"""Stochastic rounding to a 16-bit float."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import saturate
from optax_mp.compact._random_numbers import uniform_numbers


def round_stochastically(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Round `x` up or down to a neighbour in a floating `dtype` of 16 bits or less.

    The nearer neighbour is more likely, so that the expectation is `x`. Values of
    `dtype` and NaN stay; values beyond its range become the largest finite one.

    Returns:
        The rounded values, in float32.
    """
    x = saturate(x.astype(jnp.float32), dtype)
    info = jnp.finfo(dtype)
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        # bfloat16 is the upper half of float32; the lower half is the fraction of a
        # unit that is rounded.
        unit = 1 << (23 - info.nmant)
        below, rest = pattern & -unit, (pattern & (unit - 1)).astype(jnp.float32)
        rises = uniform_numbers(x.shape, key) * unit < rest
        rounded = lax.bitcast_convert_type(below + unit * rises, jnp.float32)
    else:
        power = lax.bitcast_convert_type(pattern & 0x7F800000, jnp.float32)
        spacing = jnp.maximum(power, float(info.smallest_normal)) * float(info.eps)
        multiple = x / spacing
        below = jnp.floor(multiple)
        rises = uniform_numbers(x.shape, key) < multiple - below
        rounded = (below + rises) * spacing
    return jnp.where(jnp.isnan(x) | (x == 0), x, saturate(rounded, dtype))
