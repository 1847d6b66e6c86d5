"""The mark by which a loss scale in a chain tells later links that a step is skipped.

A link of `optax.chain` cannot stop those that follow. It hands them negative zeros:
numerically zero for every optimizer, and real gradients are hardly ever all negative
zeros. If a later `mixed_precision` finds nothing but negative zeros, it skips the step.

The search for the mark reads all gradients once more, and needs a collective if they
are sharded. So optimizers search only after a link has run its first update in this
process. No other call to this package changes the effect of a later one.
docs/design/mark.md says what follows from that, and which other marks were tried.
"""

import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._choose import or_negative_zeros
from optax_mp._context import Choice, context_of
from optax_mp._dtypes import bits
from optax_mp._jax._contact import varies_by_rank
from optax_mp._jax._sharding import constant_like
from optax_mp._tree import PyTree, all_true, is_inexact
from optax_mp.scaling._overwrite import hide_overwritten

# Whether a link has run. Never reset: the garbage collector would decide how long one
# exists, and a link that `optax.inject_hyperparams` makes lives for one call.
_a_link_ran = threading.Event()


def mark_skipped(finite: jax.Array, grads: PyTree) -> PyTree:
    """Return gradients for the links that follow: negative zeros in a skipped step."""
    _a_link_ran.set()
    return jax.tree.map(lambda grad: or_negative_zeros(finite, grad), grads)


def is_unmarked(grads: PyTree, extra_args: Mapping[str, Any]) -> Choice:
    """Return whether to take the step; a plain True if there cannot be a mark.

    A link hands on float32 or wider gradients. So if one has 16 bits, there is none.
    Nor is there one if the wrapper directly around decides what is skipped.
    """
    if not _a_link_ran.is_set() or context_of(extra_args).proceed is not True:
        return True
    # A link does not mark the gradients of overwritten leaves.
    grads = hide_overwritten(grads)
    leaves = [x for x in jax.tree.leaves(grads) if is_inexact(x) and x.size]
    if not leaves or any(bits(leaf.dtype) < 32 for leaf in leaves):
        return True
    # Under shard_map a rank sees only its own part of such gradients, and values that
    # are equal on all ranks must not depend on that part.
    if any(map(varies_by_rank, leaves)):
        return True
    return ~all_true([_is_negative_zero(leaf) for leaf in leaves])


def _is_negative_zero(x: Any) -> jax.Array:
    """Return whether all of `x` is negative zero."""
    if jnp.iscomplexobj(x):
        return _is_negative_zero(jnp.real(x)) & _is_negative_zero(jnp.imag(x))
    # Compared as bits, because CPUs compare the smallest numbers equal to zero.
    integer = jnp.dtype(f"int{bits(x.dtype)}")
    pattern = lax.bitcast_convert_type(x, integer)
    is_least = lax.eq(pattern, constant_like(pattern, jnp.iinfo(integer).min))
    return lax.reduce_and(is_least, range(x.ndim))
