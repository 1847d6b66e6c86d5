"""The state of a loss scale: how to find it in an optimizer state, and to check it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path

from optax_mp._jax._arrays import is_traced
from optax_mp._warnings import warn, warn_unless_scaled
from optax_mp.scaling._rule import check_number
from optax_mp.trees._boxes import plain, plain_trees
from optax_mp.trees._leaves import is_absent
from optax_mp.trees._states import check_classes, find_states, inner_field
from optax_mp.trees._tree import (
    copy_shared,
    is_floating,
    nonfinite_paths,
    spell,
)
from optax_mp.wrappers._mistakes import (
    check_nesting,
    check_opt_state,
    warn_unless_state,
)

# A param of this size is a sign that training has diverged: float16 ends at 65504.
_LARGE_PARAM = 1e4
_LARGEST_FLOAT16 = 65504
# Of the gradients of a model that trains the norm is rarely smaller.
_SMALL_NORM = 1e-4


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`.

    The scale is always finite and within its bounds, and a power of two if it starts as
    one and its factors are. Structure, shapes and dtypes never change.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_count: finite steps in a row since growth was last due, an int32 scalar.
        hysteresis_left: overflows until the scale shrinks, an int32 scalar; -1 from an
            overflow at `min_scale` until growth is due.
        skipped_count: steps skipped since the last finite one, an int32 scalar.
        total_skipped_count: steps skipped since `init`, an int32 scalar.
        last_finite: whether the last step was finite, a bool scalar.
        inner_state: the state of the inner optimizer; empty for a link in a chain. Its
            public fields, such as `hyperparams`, are also attributes of this state.
        nonfinite_index: which leaf was the first that was not finite in the last
            skipped step, as an index into the leaves of the gradients (None counts as a
            leaf), an int32 scalar; -1 if no step was skipped. `check_loss_scale` names
            the leaf.
        dropped_count: micro-batches dropped since `init`, the sum of all
            `dropped_count` that `update` was given, an int32 scalar.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
        >>> state = tx.init(jnp.ones(2))
        >>> updates, state = tx.update(jnp.array([jnp.inf, 0.0]), state, jnp.ones(2))
        >>> float(state.scale), int(state.total_skipped_count), bool(state.last_finite)
        (32768.0, 1, False)
    """

    scale: jax.Array
    finite_count: jax.Array
    hysteresis_left: jax.Array
    skipped_count: jax.Array
    total_skipped_count: jax.Array
    last_finite: jax.Array
    inner_state: optax.OptState
    nonfinite_index: jax.Array | int = -1
    dropped_count: jax.Array | int = 0
    __getattr__ = inner_field


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """Return the loss scale in an optimizer state, at any depth of wrappers.

    Args:
        opt_state: any optimizer state.

    Returns:
        A float32 scalar; 1 if the state holds no loss scale.

    Raises:
        TypeError: if `opt_state` is no optimizer state.
        ValueError: if the state holds several loss scales, or is of transforms in an
            order that does not work, such as `optax.MultiSteps` around a loss scale.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax.chain(optax_mp.dynamic_loss_scale(), optax.sgd(0.1))
        >>> float(optax_mp.loss_scale(tx.init(jnp.ones(2))))
        65536.0
    """
    state = loss_scale_state(plain(opt_state), "loss_scale")
    return jnp.float32(1) if state is None else copy_shared(state.scale, state)


def loss_scale_state(opt_state: Any, caller: str) -> LossScaleState | None:
    """Return the one loss-scale state in `opt_state`, or None."""
    check_opt_state(opt_state, caller)
    check_nesting(opt_state, caller)
    found = find_states(opt_state, LossScaleState)
    if len(found) > 1:
        places = " and ".join("opt_state" + keystr(path) for path, _ in found)
        raise ValueError(
            f"{caller}: expected one loss scale in `opt_state`, because a loss is "
            f"multiplied by one, got {len(found)}, at {places}; put a single "
            "dynamic_loss_scale around the whole optimizer."
        )
    if found:
        return found[0][1]
    check_classes(opt_state, caller)
    warn_unless_state(opt_state, caller)
    return None


def check_loss_scale(
    opt_state: optax.OptState,
    max_skipped: int = 30,
    *,
    params: Any = None,
    grads: Any = None,
) -> None:
    """Raise if too many steps in a row were skipped, or the scale is at its floor.

    Call it every hundred steps or so, outside `jit`, because it waits for the values.
    Overflows stop when the scale is low enough; a NaN from the model itself does not.
    With the defaults, 30 skipped steps take the scale from 65536 down to `min_scale`.
    An overflow there is an error as well, until the scale has grown again: float16
    loses small gradients at such a scale. The error says whether an overflow is
    possible, or single batches are bad.

    Warns after finite steps if neither `value_and_grad` nor `scale_loss` was called in
    this process and no step was ever skipped: then the loss was probably not scaled.
    Warns if `grads` are smaller than the scale makes plausible: then they were probably
    clipped or unscaled before `tx.update`, which unscales them once more.

    Args:
        opt_state: a state with a loss scale in it, at any depth of wrappers. A state
            without one passes the check. If the counters have leading axes, as under
            `vmap` over seeds or `pmap`, a member at its floor is checked, or else the
            one with the most skipped steps.
        max_skipped: how many skipped steps in a row are accepted.
        params: the params, to name the first leaf whose gradient was not finite in the
            last skipped step, and to see whether training has diverged. The first in
            the order of the tree, which need not be the one where the NaN began.
        grads: the last gradients as `tx.update` got them, to name all leaves that are
            not finite, and to see whether they are scaled.

    Raises:
        FloatingPointError: if more than `max_skipped` steps in a row were skipped, or
            the scale is at its floor; with the counters, the leaf, the member, and the
            likely cause.
        TypeError: if called under `jit`, or if an argument is of the wrong kind.
        ValueError: if the state holds several loss scales.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2), "b": jnp.ones(1)}
        >>> tx = optax_mp.static_loss_scale(optax.sgd(0.1))
        >>> state = tx.init(params)
        >>> optax_mp.check_loss_scale(state, params=params)
        >>> bad = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(1)}
        >>> updates, state = tx.update(bad, state, params)
        >>> optax_mp.check_loss_scale(
        ...     state, max_skipped=0, params=params
        ... )  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FloatingPointError: check_loss_scale: 1 steps ... not finite was ['w'].
    """
    grads = plain(grads, opt_state)
    opt_state, params = plain_trees(opt_state, params)
    state = loss_scale_state(opt_state, "check_loss_scale")
    expected = "a number of steps (pass gradients by keyword, as `grads=grads`)"
    name = "check_loss_scale: `max_skipped`"
    check_number(name, max_skipped, expected, lambda _: True)
    if state is None:
        return
    if is_traced(state.scale):
        raise TypeError(
            "check_loss_scale: expected a concrete loss scale, got a traced one; call "
            "it outside jit."
        )
    state = jax.device_get(state._replace(inner_state=()))
    member, state, params, grads = _worst_member(state, params, grads)
    # The counters cannot tell: without the scale nothing overflows, and the scale grows
    # to its bound, after thousands of steps with gradients divided by it.
    skipped, total = state.skipped_count, state.total_skipped_count
    if state.scale != 1 and state.finite_count > 0 and total == 0:
        scale = f"is {state.scale:g}, no step was ever skipped"
        warn_unless_scaled("check_loss_scale", scale)
    _warn_of_small_gradients(state, grads)
    whose = f" of member {list(member)}" if member else ""
    if skipped > max_skipped:
        fault = (
            f"{skipped} steps in a row{whose} had non-finite gradients and were "
            f"skipped (allowed: {max_skipped}; skipped since `init`: {total})"
        )
    elif state.hysteresis_left < 0:
        fault = (
            f"steps{whose} overflowed at the lower bound of the loss scale, where "
            f"float16 loses small gradients (skipped since `init`: {total})"
        )
    else:
        return
    cause = _explain_cause(state, params)
    leaves = _say_leaves(state, opt_state, params, grads)
    raise FloatingPointError(
        f"check_loss_scale: {fault}, and the loss scale {cause} {leaves}"
    )


def _say_leaves(state: LossScaleState, opt_state: Any, params: Any, grads: Any) -> str:
    """Return a sentence that names the leaves that were not finite."""
    if grads is not None:
        return f"Leaves: {', '.join(nonfinite_paths(grads)) or 'none in `grads`'}."
    if params is None:
        return (
            "Pass `params=params`, or find leaves by optax_mp.nonfinite_paths(grads)."
        )
    paths = [path for path, _ in tree_flatten_with_path(params, is_leaf=is_absent)[0]]
    # `optax.masked` and `optax.partition` hide leaves and whole branches from a loss
    # scale in them, so that the indices of the others are unknown.
    masked = find_states(opt_state, optax.MaskedState)
    are_masked = any(find_states(x, LossScaleState) for _, x in masked)
    index = int(state.nonfinite_index)
    name = f"number {index} of the gradients that the loss scale sees, counted from 0"
    if 0 <= index < len(paths) and not are_masked:
        name = spell(paths[index])
    return f"The first leaf that was not finite was {name}."


def _worst_member(state: LossScaleState, *trees: Any) -> tuple[Any, ...]:
    """Return the index of the member in most trouble, its state, and its trees.

    The counters of a state have leading axes under `vmap` over seeds, or `pmap`. A
    state without them is the only member, and has the index ().
    """
    shape = np.shape(state.scale)
    # The last key counts most: whether the scale is at its floor.
    counts = state.total_skipped_count, state.skipped_count, state.hysteresis_left < 0
    worst = np.lexsort(list(map(np.ravel, counts)))[-1]
    member = tuple(map(int, np.unravel_index(worst, shape)))

    def of_member(x: Any) -> Any:
        return x[member] if shape and np.shape(x)[: len(shape)] == shape else x

    return member, *jax.tree.map(of_member, (state, *trees))


def _explain_cause(state: LossScaleState, params: Any) -> str:
    """Return what scale and params say of the cause: overflow, divergence or a NaN."""
    # Only a dynamic scale without hysteresis left has been lowered.
    scale = f"is {'down to ' if state.hysteresis_left <= 0 else ''}{state.scale:g}."
    diverged = "training that has diverged (learning rate? loss scaled twice?)"
    # The largest magnitude in each leaf, NaN as inf.
    sizes = [
        (float(jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf))), spell(path))
        for path, x in tree_leaves_with_path(params)
        if is_floating(x) and x.size
    ]
    size, path = max(sizes, default=(0.0, ""))
    if size > _LARGE_PARAM:
        return f"{scale} The largest param is {size:.3g}, at {path}, by {diverged}."
    is_stuck = state.hysteresis_left < 0
    overflow, remedy = "a lower scale ends this", "raise `max_skipped`, or start lower"
    if is_stuck:
        overflow, remedy = "the loss is finite in these steps", "lower `min_scale`"
    sign = f"If {overflow}, it is an overflow: {remedy}. If not, it is"
    if state.scale <= 1:
        largest = _LARGEST_FLOAT16 / state.scale
        sign = f"Only gradients over {largest:.3g} overflow at this scale, so this is"
    explained = (
        f"{scale} {sign} a NaN or infinity of the model or its data, such as a "
        f"division by zero or the log of a negative number, or {diverged}."
    )
    if is_stuck:
        explained += (
            " Pass `tx.update(grads, state, params, value=loss)`: a step whose loss is "
            "not finite then keeps the scale."
        )
    return explained


def _warn_of_small_gradients(state: LossScaleState, grads: Any) -> None:
    """Warn if gradients look plausible as they are, but not once they are unscaled.

    A gradient of 0.1 may be a large one that was unscaled by hand, or a scaled one of
    1e-6. Only the size of all together tells: few models that train have a smaller one.
    """
    arrays = [x.astype(jnp.float32) for x in jax.tree.leaves(grads) if is_floating(x)]
    norm = float(optax.tree.norm(arrays))
    if _SMALL_NORM <= norm < _SMALL_NORM * state.scale:
        warn(
            f"check_loss_scale: expected a norm of {_SMALL_NORM} or more for the "
            f"unscaled gradients, got {norm / state.scale:.1g}; `grads` were probably "
            "clipped or unscaled before `tx.update`, which unscales them. Clip inside, "
            "as `optax_mp.dynamic_loss_scale(optax.chain(clip, ...))`."
        )
