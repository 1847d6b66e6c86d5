"""Leaves that are overwritten with their gradient: the scales of flax's fp8 layers.

An fp8 layer of flax returns the next value of its scales and histories in the place of
their gradients. They are no gradients: do not unscale, check or optimize them.
"""

from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey, GetAttrKey, tree_leaves_with_path, tree_map_with_path

from optax_mp._dtypes import at_least_float32, difference
from optax_mp._warnings import warn
from optax_mp.trees._leaves import Leaves
from optax_mp.trees._tree import PyTree, is_floating
from optax_mp.wrappers._arguments import require_params

# The collection of these leaves, `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`.
_COLLECTION = "_overwrite_with_gradient"
_KEYS = frozenset((DictKey(_COLLECTION), GetAttrKey(_COLLECTION)))


def hide_overwritten(tree: PyTree) -> PyTree:
    """Return `tree` with `optax.MaskedNode()` for each leaf that is overwritten."""
    if not _has_overwritten(tree):
        return tree
    return tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if _is_overwritten(path) else leaf, tree
    )


def hand_on_overwritten(tree: PyTree, grads: PyTree, caller: str) -> PyTree:
    """Return `tree` with the leaves of `grads` in the place of the hidden ones.

    Warns that a link of a chain cannot overwrite these.
    """
    if not _has_overwritten(grads):
        return tree
    warn(
        f"{caller}: gradients under {_COLLECTION!r} are to take the place of their "
        "params. As a link of a chain this transform only hands them on, and an "
        "optimizer after it moves these params as if they were weights; put "
        f"`optax_mp.{caller}` around the optimizer."
    )
    return tree_map_with_path(
        lambda path, old, new: old if _is_overwritten(path) else new, grads, tree
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
    paths = [path for path, _ in tree_leaves_with_path(tree)]
    return not _KEYS.isdisjoint(chain.from_iterable(paths))


def _is_overwritten(path: tuple[Any, ...]) -> bool:
    return not _KEYS.isdisjoint(path)
