"""The mark by which a loss scale in a chain tells later links that a step is skipped.

A link of `optax.chain` cannot stop those that follow. It hands them negative zeros:
numerically zero to every rule, and hardly ever a gradient by itself. If a
`mixed_precision` further on finds nothing but negative zeros, it skips the step.

To find them, it has to read all gradients once more. So it looks for them only while a
link exists in this process, that is a `dynamic_loss_scale()` or `static_loss_scale()`
without `inner`. That one was made is what counts, not that it ran earlier in the same
trace, because a link may be compiled apart from the optimizer that follows it. A link
that `optax.inject_hyperparams` makes lives for one call only, but the state that it
returns lives on: while that exists, the mark is looked for, too.
"""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import bits
from optax_mp._jax._arrays import varies
from optax_mp._jax._choose import Choice, or_negative_zeros
from optax_mp._tree import PyTree, all_hold, is_inexact
from optax_mp.loss_scale._overwrite import hide_overwritten

# The `update` functions of all links that are still in use, and an array of each state
# that such a function returned, by their ids: arrays are not hashable.
_links: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_link(owner: Any) -> None:
    """Have the mark looked for as long as `owner` exists.

    Args:
        owner: the `update` function of a link, or an array of a state it returned.
    """
    _links[id(owner)] = owner


def mark_skipped(finite: jax.Array, grads: PyTree) -> PyTree:
    """Return gradients for the links that follow: negative zeros in a skipped step."""
    return jax.tree.map(lambda grad: or_negative_zeros(finite, grad), grads)


def is_unmarked(grads: PyTree) -> Choice:
    """Return whether to proceed: a plain True where no mark can be.

    Only float32 and wider gradients can carry the mark, because a loss scale makes
    float32 of them: where one has 16 bits, nothing is looked at.
    """
    # A link hands gradients of overwritten leaves on as they are, in skipped steps too.
    grads = hide_overwritten(grads)
    leaves = [x for x in jax.tree.leaves(grads) if is_inexact(x) and x.size]
    if not _links or not leaves or any(bits(leaf.dtype) < 32 for leaf in leaves):
        return True
    # Under shard_map a rank could only say whether its own part is marked, and what is
    # the same on all ranks must not depend on that.
    if any(map(varies, leaves)):
        return True
    return ~all_hold([_is_negative_zero(leaf) for leaf in leaves])


def _is_negative_zero(x: Any) -> jax.Array:
    """Return whether all of `x` is negative zero."""
    if jnp.iscomplexobj(x):
        return _is_negative_zero(jnp.real(x)) & _is_negative_zero(jnp.imag(x))
    # By bits, because CPUs compare the smallest numbers equal to zero; and as the
    # largest of integers, because XLA's CPU kernels would write out an array of bools.
    unsigned = jnp.dtype(f"uint{bits(x.dtype)}")
    sign = unsigned.type(1 << (bits(x.dtype) - 1))
    differing = lax.bitcast_convert_type(x, unsigned) ^ sign
    return lax.reduce_max(differing, range(differing.ndim)) == 0
