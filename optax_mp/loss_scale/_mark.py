"""The mark by which a loss scale in a chain tells later links that a step is skipped.

A link of `optax.chain` cannot stop those that follow. It hands them negative zeros:
numerically zero for every optimizer, and real gradients are hardly ever all negative
zeros. If a later `mixed_precision` finds nothing but negative zeros, it skips the step.

This check reads all gradients once more. So it is made only while a link exists in this
process, that is a `dynamic_loss_scale()` or `static_loss_scale()` without `inner`. It
is not enough to check only if a link ran earlier in the same trace, because a link may
be compiled apart from the optimizer that follows it. A link that
`optax.inject_hyperparams` makes lives for one call only, but the state that it returns
lives on: the check is made while that exists, too.
"""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import bits
from optax_mp._jax._arrays import varies_by_rank
from optax_mp._jax._choose import Choice, or_negative_zeros
from optax_mp._tree import PyTree, all_true, is_inexact
from optax_mp.loss_scale._overwrite import hide_overwritten

# The `update` functions of all links that are still in use, and an array of each state
# that such a function returned, by their ids: arrays are not hashable.
_links: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_link(owner: Any) -> None:
    """Make `is_unmarked` check gradients as long as `owner` exists.

    Args:
        owner: the `update` function of a link, or an array of a state it returned.
    """
    _links[id(owner)] = owner


def mark_skipped(finite: jax.Array, grads: PyTree) -> PyTree:
    """Return gradients for the links that follow: negative zeros in a skipped step."""
    return jax.tree.map(lambda grad: or_negative_zeros(finite, grad), grads)


def is_unmarked(grads: PyTree) -> Choice:
    """Return whether to take the step; a plain True if there cannot be a mark.

    A link hands on float32 or wider gradients. So if one has 16 bits, there is none.
    """
    if not _links:
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
    # As bits, because CPUs compare the smallest numbers equal to zero. By the maximum,
    # because for `all` XLA's CPU kernels would write out an array of bools.
    unsigned = jnp.dtype(f"uint{bits(x.dtype)}")
    sign = unsigned.type(1 << (bits(x.dtype) - 1))
    differing = lax.bitcast_convert_type(x, unsigned) ^ sign
    return lax.reduce_max(differing, range(differing.ndim)) == 0
