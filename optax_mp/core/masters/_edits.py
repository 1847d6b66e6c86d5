"""Params that were edited outside of the optimizer, and their masters."""

import jax
from jax import lax

from optax_mp.core._dtypes import at_least_float32, round_to


def follow_edits(master: jax.Array, param: jax.Array) -> jax.Array:
    """Return `master`, or the param where it differs from the rounded master.

    An infinite or NaN param is not an edit: a large master may have overflowed in the
    cast, and an infinite param stays infinite whatever its master is.

    Args:
        master: floating `[...]`.
        param: floating `[...]`, narrower than the master.

    Returns:
        `[...]`, in the dtype of the master.
    """
    wide = lax.convert_element_type(param, at_least_float32(master.dtype))
    # As numbers and not as patterns: -0.0 is not an edit of 0.0.
    is_edited = lax.is_finite(wide) & lax.ne(wide, round_to(master, param.dtype))
    edited = lax.convert_element_type(wide, master.dtype)
    return lax.select(is_edited, edited, master)


# Jitted, so that it is traced once for all leaves of one shape and dtype.
@jax.jit
def follow_edits_if(
    follows: jax.Array, master: jax.Array, param: jax.Array
) -> jax.Array:
    """Return what `follow_edits` does if `follows`, bool `[]`, else the master."""
    return lax.select(follows, follow_edits(master, param), master)
