"""Params that a loop has edited between two steps: the edit is the new master."""

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import at_least_float32, bits, round_to


def shows_edits(param_dtype: jnp.dtype, update_dtype: jnp.dtype) -> bool:
    """Return whether updates of a dtype bring a param to its master rounded, exactly.

    Then a param that is anything else was edited. A float32 sum of params of 16 or 8
    bits lands exactly, and so does a float64 sum of float32 params. The exception is a
    weight that a step shrinks to less than 2^-15 (float16: 2^-12) of what it was. Such
    a param, too, is taken as its master: both move by at most 2^-23 of the old weight.
    """
    return bits(update_dtype) >= 32 and bits(update_dtype) > bits(param_dtype)


def follow_edits(master: jax.Array, param: jax.Array) -> jax.Array:
    """Return `master`, but the param where this is not the master rounded.

    A param that is not finite is no edit: a large weight may have overflowed in the
    cast, and an infinite one stays infinite whatever its master is.
    """
    wide = lax.convert_element_type(param, at_least_float32(master.dtype))
    # As numbers and not as bits: -0.0 is no edit of 0.0.
    is_edited = lax.is_finite(wide) & lax.ne(wide, round_to(master, param.dtype))
    edited = lax.convert_element_type(wide, master.dtype)
    return lax.select(is_edited, edited, master)
