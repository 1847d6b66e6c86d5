"""Multiply and divide trees by a loss scale, check them, and mark a skipped step.

A link of `optax.chain` cannot stop those that follow. It hands them negative zeros:
numerically zero for every optimizer, and real gradients are hardly ever all negative
zeros. If a later `mixed_precision` finds nothing but negative zeros, it skips the step.

The search for the mark reads all gradients once more, and needs a collective if they
are sharded. So optimizers search only after a link has run its first update in this
process. No other call to this package changes the effect of a later one.
docs/design/mark.md says what follows from that, and which other marks were tried.

An fp8 layer of flax returns the next value of its scales and histories in the place of
their gradients. Such leaves are overwritten: not unscaled, checked or optimized.
"""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey, GetAttrKey, tree_leaves_with_path, tree_map_with_path
from jax.typing import ArrayLike

from optax_mp._dtypes import at_least_float32, bits
from optax_mp._jax._contact import varying_axes
from optax_mp._warnings import warn
from optax_mp.scaling._state import LossScaleState
from optax_mp.trees._leaves import Leaves, is_absent
from optax_mp.trees._states import find_states
from optax_mp.trees._tree import PyTree, all_true, is_floating, is_inexact, leaf_finite
from optax_mp.wrappers._choose import difference, or_negative_zeros
from optax_mp.wrappers._context import Choice, context_of
from optax_mp.wrappers._inner import require_params

# The collection of these leaves, `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`.
_COLLECTION = "_overwrite_with_gradient"
_KEYS = frozenset((DictKey(_COLLECTION), GetAttrKey(_COLLECTION)))
# In the place of an index, where all leaves are finite. Larger than any index, so that
# the minimum over leaves, and over ranks, is the first leaf that is not.
ALL_FINITE = 2**31 - 1


def multiply(tree: PyTree, factor: ArrayLike) -> PyTree:
    """Multiply floating and complex leaves by `factor`, in float32 or wider."""
    return _multiply(tree, lambda dtype: jnp.asarray(factor, dtype))


def divide(tree: PyTree, divisor: ArrayLike) -> PyTree:
    """Divide floating and complex leaves by `divisor`, in float32 or wider."""
    # Multiply by the reciprocal, which is exact for powers of two: XLA never recomputes
    # a division, so it would store all quotients before the optimizer reads them.
    return _multiply(tree, lambda dtype: 1 / jnp.asarray(divisor, dtype))


def unscale(grads: PyTree, scale: jax.Array) -> tuple[PyTree, jax.Array]:
    """Return (`grads` divided by `scale`, index of the first leaf not finite).

    The index is `ALL_FINITE` if there is none. The quotients are checked, not the
    gradients: divided by a scale below 1, a finite gradient can overflow.
    """
    unscaled = divide(grads, scale)
    # With a place for None and `MaskedNode`, so that gradients and params have the same
    # indices: a param that is not trained has None as its gradient.
    leaves = enumerate(jax.tree.leaves(unscaled, is_leaf=is_absent))
    finite = {i: leaf_finite(leaf) for i, leaf in leaves if is_inexact(leaf)}
    if not finite:
        return unscaled, jnp.int32(ALL_FINITE)
    indices = jnp.array(list(finite), jnp.int32)
    bad = jnp.where(jnp.stack(list(finite.values())), ALL_FINITE, indices)
    # The minimum, by a sort, for the reason that `all_true` gives.
    return unscaled, lax.sort(bad)[0]


def _multiply(tree: PyTree, factor_as: Callable[[jnp.dtype], jax.Array]) -> PyTree:
    factor = cache(factor_as)  # one per dtype, not one per leaf

    def product(leaf: Any) -> Any:
        # A loss may be a Python number.
        if not (is_inexact(leaf) or isinstance(leaf, float)):
            return leaf
        array = jnp.asarray(leaf)
        # A float16 loss of 2 times 65536 is infinite in float16.
        wide = at_least_float32(array.dtype)
        return lax.mul(array.astype(wide), factor(wide))

    return jax.tree.map(product, tree)


# Whether a link has run. Never reset: the garbage collector would decide how long one
# exists, and a link that `optax.inject_hyperparams` makes lives for one call.
_a_link_ran = threading.Event()


def hand_on(finite: jax.Array, unscaled: PyTree, grads: PyTree, caller: str) -> PyTree:
    """Return gradients for the links that follow: negative zeros in a skipped step.

    Warns that a link cannot overwrite the leaves of `grads` that `unscaled` hides.
    """
    _a_link_ran.set()
    marked = jax.tree.map(lambda x: or_negative_zeros(finite, x), unscaled)
    if not _has_overwritten(grads):
        return marked
    warn(
        f"{caller}: gradients under {_COLLECTION!r} are to take the place of their "
        "params, but an optimizer after this link moves these params as if they were "
        f"weights; put `optax_mp.{caller}` around the optimizer."
    )
    return tree_map_with_path(
        lambda path, old, new: old if _is_overwritten(path) else new, grads, marked
    )


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
    # Under shard_map a rank sees only its own part of such gradients, and values that
    # are equal on all ranks must not depend on that part.
    if not leaves or any(bits(x.dtype) < 32 or varying_axes(x) for x in leaves):
        return True
    return ~all_true([_is_negative_zero(leaf) for leaf in leaves])


def warn_unless_counted(extra_args: Any, inner_state: PyTree, caller: str) -> None:
    """Warn if an update is given dropped micro-batches and no loss scale is there."""
    if "dropped_count" not in extra_args or _a_link_ran.is_set():
        return
    if not find_states(inner_state, LossScaleState):
        warn(
            f"{caller}: expected a loss scale that takes `dropped_count`, got none, so "
            "that a step in which all micro-batches were dropped makes params NaN; put "
            f"`optax_mp.static_loss_scale` around `{caller}`."
        )


def _is_negative_zero(x: Any) -> jax.Array:
    """Return whether all of `x` is negative zero."""
    if jnp.iscomplexobj(x):
        return _is_negative_zero(jnp.real(x)) & _is_negative_zero(jnp.imag(x))
    return lax.reduce_and((x == 0) & jnp.signbit(x), range(x.ndim))


def hide_overwritten(tree: PyTree) -> PyTree:
    """Return `tree` with `optax.MaskedNode()` for each leaf that is overwritten."""
    if not _has_overwritten(tree):
        return tree
    return tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if _is_overwritten(path) else leaf, tree
    )


def update_overwritten(
    updates: PyTree, grads: PyTree, params: PyTree, caller: str
) -> PyTree:
    """Return `updates` with those that bring overwritten params to their gradients."""
    if not _has_overwritten(grads):
        return updates
    leaves = Leaves.of(grads, caller=caller, name="the gradients")
    filled = leaves.match(updates, "the updates of `inner`")
    params = leaves.match(require_params(params, caller), "`params`")
    for i, path in enumerate(leaves.paths):
        if _is_overwritten(path):
            filled[i] = change_to(leaves.values[i], params[i])
    return leaves.unflatten(filled)


def change_to(target: Any, param: Any) -> jax.Array:
    """Return the update that brings `param` to `target`, as nearly as a sum can.

    Adds as `optax.apply_updates` does, in float32 or wider. A target that is not
    0 never becomes 0, because flax divides by these values. An infinite param stays.
    """
    target, param = jnp.asarray(target), jnp.asarray(param)
    if not is_floating(target):
        return target - param
    wide = jnp.promote_types(*(at_least_float32(x.dtype) for x in (target, param)))
    start, goal = param.astype(wide), target.astype(wide)
    # A float16 param would round a float32 target of 1e-9 to 0.
    least = wide.type(jnp.finfo(param.dtype).smallest_subnormal)
    is_zero = goal == 0
    goal = jnp.where(is_zero, goal, jnp.copysign(jnp.maximum(abs(goal), least), goal))
    change = difference(goal, start)
    # From 1.0 to 1e-9 the change is -1.0 in float32, and the sum 0. The float next to
    # -1.0 brings the param as near to the target as a sum can, with the target's sign.
    side = jnp.copysign(jnp.full_like(goal, jnp.inf), goal)
    next_to_zero = lax.nextafter(-start, side)
    return jnp.where((change == -start) & ~is_zero, next_to_zero, change)


def _has_overwritten(tree: PyTree) -> bool:
    return any([_is_overwritten(path) for path, _ in tree_leaves_with_path(tree)])


def _is_overwritten(path: tuple[Any, ...]) -> bool:
    return not _KEYS.isdisjoint(path)
