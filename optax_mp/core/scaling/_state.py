"""The state of a loss scale: how to find it in an optimizer state, and to check it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from optax_mp.core import _dtypes
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api._arrays import is_traced
from optax_mp.core.scaling._rule import AT_FLOOR, check_number
from optax_mp.core.trees import _states, _tree
from optax_mp.core.trees._boxes import plain, plain_trees
from optax_mp.core.trees._leaves import is_absent
from optax_mp.core.wrappers import _mistakes

# `nonfinite_index` after a step that was skipped because of its loss. All gradients of
# such a loss are usually NaN, so that the first of them says nothing.
BAD_LOSS = -2
# The norm of the gradients of a model that trains is rarely smaller.
_SMALL_NORM = 1e-4


@_states.own_state
class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`.

    The scale is always finite and within its bounds, and a power of two if it starts as
    one and its factors are. Structure, shapes and dtypes never change.

    Attributes:
        scale: float32 `[]`, the loss scale.
        finite_count: int32 `[]`, finite steps in a row since growth was last due.
        hysteresis_left: int32 `[]`, overflows until the scale shrinks. It is -1 if the
            scale is at its floor: from an overflow at `min_scale` until growth is due.
        skipped_count: int32 `[]`, steps skipped since the last finite one.
        total_skipped_count: int32 `[]`, steps skipped since `init`.
        last_finite: bool `[]`, whether the last step was finite.
        inner_state: the state of the inner optimizer; empty for a link in a chain. Its
            public fields, such as `hyperparams`, are also attributes of this state.
        nonfinite_index: int32 `[]`, the index of the first gradient that was not finite
            in the last skipped step, among the leaves of the gradients (None counts as
            a leaf). It is -1 if no step was skipped, and -2 if the loss of that step,
            as `value` of `tx.update`, was not finite. `check_loss_scale` names the
            leaf.

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
    __getattr__ = _states.inner_field


def is_skipped_by_loss(state: LossScaleState) -> jax.Array:
    """Return whether the loss of the last skipped step was not finite, as bool `[]`.

    Then the data or the model is to blame. Otherwise it was an overflow, or the loss is
    not known.
    """
    return jnp.asarray(state.nonfinite_index == BAD_LOSS)


def is_at_floor(state: LossScaleState) -> jax.Array:
    """Return whether the scale is at its floor, as bool `[]`.

    It is from an overflow at `min_scale` until growth is due.
    """
    return state.hysteresis_left == AT_FLOOR


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """Return the loss scale in an optimizer state, at any depth of wrappers.

    Args:
        opt_state: any optimizer state.

    Returns:
        float32 `[]`; 1 if the state holds no loss scale.

    Raises:
        TypeError: if `opt_state` is not an optimizer state.
        ValueError: if the state holds several loss scales, or transforms in an order
            that does not work, such as `optax.MultiSteps` around a loss scale.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax.chain(optax_mp.dynamic_loss_scale(), optax.sgd(0.1))
        >>> float(optax_mp.loss_scale(tx.init(jnp.ones(2))))
        65536.0
    """
    state = loss_scale_state(plain(opt_state), "loss_scale")
    return jnp.float32(1) if state is None else _tree.copy_shared(state.scale, state)


def loss_scale_state(opt_state: Any, caller: str) -> LossScaleState | None:
    """Return the one loss-scale state in `opt_state`, or None."""
    _mistakes.check_opt_state(opt_state, caller)
    _mistakes.check_nesting(opt_state, caller)
    found = _states.find_states(opt_state, LossScaleState)
    if len(found) > 1:
        places = " and ".join("opt_state" + keystr(path) for path, _ in found)
        raise ValueError(
            f"{caller}: expected one loss scale in `opt_state`, got {len(found)}, at "
            f"{places}; put a single `dynamic_loss_scale` around the whole optimizer."
        )
    if found:
        return found[0][1]
    _states.check_classes(opt_state, caller)
    _mistakes.warn_unless_state(opt_state, caller)
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
    loses small gradients at such a scale.

    With `grads` it warns if they are smaller than the scale makes plausible: then the
    loss was probably not scaled, or they were clipped or unscaled before `tx.update`,
    which divides them by the scale in any case.

    Args:
        opt_state: a state with a loss scale in it, at any depth of wrappers. A state
            without one passes the check. If the counters have leading axes, as under
            `vmap` over seeds or `pmap`, one member is checked: one at its floor, or
            else the one with the most skipped steps.
        max_skipped: how many skipped steps in a row are accepted.
        params: the params. With them the error names the first leaf, in the order of
            the tree, whose gradient was not finite in the last skipped step; a NaN may
            have begun in another leaf. If the loss of that step, as `value`, was not
            finite either, the error says so instead.
        grads: the last gradients that `tx.update` got, to check whether they are
            scaled, and to name the leaf if there are no `params`; or only their norm,
            `optax.tree.norm(grads)`, which is cheaper to return from a step.

    Raises:
        FloatingPointError: if more than `max_skipped` steps in a row were skipped, or
            the scale is at its floor. The error gives the counters, the leaf, the
            member, and what to do.
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
        FloatingPointError: check_loss_scale: 1 steps ... not finite was ['w']; ...
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
    _warn_of_small_gradients(state, grads)
    whose = f" of member {list(member)}" if member else ""
    if is_at_floor(state):
        fault = f"the loss scale{whose} is at its floor, where small gradients are lost"
        remedy = (
            "pass `value=loss` to `tx.update`; if the loss is finite in these steps, "
            "lower `min_scale`"
        )
    elif state.skipped_count > max_skipped:
        count = state.skipped_count
        fault = f"{count} steps in a row{whose} were skipped, over {max_skipped}"
        remedy = (
            "look for a NaN of the model or its data, lower the learning rate, or "
            "raise `max_skipped`"
        )
    else:
        return
    culprit = (
        "in the last of them the loss was not finite either"
        if is_skipped_by_loss(state)
        else "the first gradient that was not finite was "
        f"{_first_bad_leaf(state, opt_state, grads if params is None else params)}"
    )
    raise FloatingPointError(
        f"check_loss_scale: {fault}. The scale is {state.scale:g}, "
        f"{state.total_skipped_count} steps were skipped since `init`, and {culprit}; "
        f"{remedy}."
    )


def _first_bad_leaf(state: LossScaleState, opt_state: Any, tree: Any) -> str:
    """Name the first gradient that was not finite in the last skipped step.

    Args:
        state: the state of the loss scale.
        opt_state: the whole state.
        tree: a tree like the gradients; None if there is none.
    """
    index = int(state.nonfinite_index)
    paths = [path for path, _ in tree_leaves_with_path(tree, is_leaf=is_absent)]
    # `optax.masked` and `optax.partition` hide leaves and whole branches from a loss
    # scale in them, so that the indices of the others are unknown.
    masked = _states.find_states(opt_state, optax.MaskedState)
    is_masked = any(_states.find_states(x, LossScaleState) for _, x in masked)
    if tree is None or is_masked or not 0 <= index < len(paths):
        return f"number {index} of those that the loss scale sees, counted from 0"
    return _tree.spell(paths[index])


def _worst_member(state: LossScaleState, *trees: Any) -> tuple[Any, ...]:
    """Return the index of the member in most trouble, its state, and its trees.

    Under `vmap` over seeds, or `pmap`, the counters of a state are `[B]`. A state with
    counters `[]` is the only member, and has the index ().
    """
    shape = np.shape(state.scale)
    # The last key counts most: whether the scale is at its floor.
    counts = state.total_skipped_count, state.skipped_count, is_at_floor(state)
    worst = np.lexsort(list(map(np.ravel, counts)))[-1]
    member = tuple(map(int, np.unravel_index(worst, shape)))

    def of_member(x: Any) -> Any:
        return x[member] if shape and np.shape(x)[: len(shape)] == shape else x

    return member, *jax.tree.map(of_member, (state, *trees))


def _warn_of_small_gradients(state: LossScaleState, grads: Any) -> None:
    """Warn if gradients look plausible, but would not once they are unscaled.

    A gradient of 0.1 may be a large one that was unscaled by hand, or a scaled one of
    1e-6. Only the size of all together tells: few models that train have a smaller one.
    """
    arrays = [
        x.astype(jnp.float32) for x in jax.tree.leaves(grads) if _dtypes.is_floating(x)
    ]
    norm = float(optax.tree.norm(arrays))
    if _SMALL_NORM <= norm < _SMALL_NORM * state.scale:
        warn(
            f"check_loss_scale: expected a norm of {_SMALL_NORM} or more for the "
            f"unscaled gradients, got {norm / state.scale:.1g}; pass scaled `grads`, "
            "as `optax_mp.value_and_grad` returns them."
        )
