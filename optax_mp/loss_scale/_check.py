"""A check for the training loop, outside of `jit`: were too many steps skipped?"""

from typing import Any

import jax
import optax

from optax_mp._jax._arrays import is_traced
from optax_mp._tree import describe, nonfinite_paths
from optax_mp._warnings import warn
from optax_mp.loss_scale._settings import check_number
from optax_mp.loss_scale._state import LossScaleState, loss_scale_state

# The default `max_scale`: a state does not say its own.
_SUSPICIOUS_SCALE = 2.0**24


def check_loss_scale(
    opt_state: optax.OptState, max_skipped: int = 30, *, grads: Any = None
) -> None:
    """Raise if too many steps in a row were skipped.

    Call it every hundred steps or so, outside `jit`, because it waits for the values.
    Overflows stop when the scale is low enough; a NaN from the model itself does not.
    With the defaults, 30 skipped steps take the scale from 65536 down to `min_scale`.

    Warns if the scale has grown to 2^24, the default `max_scale`, and no step was ever
    skipped: then gradients were probably not scaled.

    Args:
        opt_state: a state with a loss scale in it, at any depth of wrappers.
        max_skipped: how many skipped steps in a row are accepted.
        grads: the last gradients, to name the leaves that are not finite.

    Raises:
        FloatingPointError: if more than `max_skipped` steps in a row were skipped; with
            the counters, the leaves, and the likely cause.
        TypeError: if called under `jit`, or if an argument is of the wrong kind.
        ValueError: if the state holds no loss scale.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> state = optax_mp.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
        >>> optax_mp.check_loss_scale(state)
        >>> state = state._replace(skipped_count=jnp.int32(31))
        >>> optax_mp.check_loss_scale(state)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FloatingPointError: check_loss_scale: 31 steps in a row ...
    """
    state = loss_scale_state(opt_state, "check_loss_scale")
    if state is None:
        raise ValueError(
            "check_loss_scale: `opt_state` holds no loss scale, expected the state of "
            "an optimizer with optax_mp.dynamic_loss_scale in it."
        )
    _check_arguments(state, max_skipped)
    state = jax.device_get(state._replace(inner_state=()))
    _warn_if_never_scaled(state)
    if state.skipped_count <= max_skipped:
        return
    leaves = "Find the leaves with optax_mp.nonfinite_paths(grads)."
    if grads is not None:
        leaves = f"Leaves: {', '.join(nonfinite_paths(grads)) or 'none in `grads`'}."
    raise FloatingPointError(
        f"check_loss_scale: {state.skipped_count} steps in a row had non-finite "
        f"gradients and were skipped (allowed: {max_skipped}; skipped since `init`: "
        f"{state.total_skipped_count}), and the loss scale is down to {state.scale:g}. "
        "An overflow would have ended as the scale fell, so this is a NaN or infinity "
        "of the model or its data, such as a division by zero or the log of a negative "
        f"number. {leaves}"
    )


def _check_arguments(state: LossScaleState, max_skipped: Any) -> None:
    if is_traced(state.scale):
        raise TypeError(
            f"check_loss_scale: the loss scale is traced ({describe(state.scale)}), "
            "expected a concrete value; call it outside jit."
        )
    check_number(
        "check_loss_scale: `max_skipped`",
        max_skipped,
        "a number of steps (pass gradients by keyword, as `grads=grads`)",
        lambda _: True,
    )


def _warn_if_never_scaled(state: LossScaleState) -> None:
    # A float16 value in the backward pass that is scaled by 2^24 overflows from 0.004
    # on. Without the scale none does, and the scale only grows.
    if state.scale >= _SUSPICIOUS_SCALE and state.total_skipped_count == 0:
        warn(
            f"check_loss_scale: the loss scale has grown to {state.scale:g}, and no "
            "step was ever skipped, so gradients are probably not scaled. They are "
            "divided by the scale all the same: take them with "
            "`optax_mp.value_and_grad(loss)(opt_state, params, ...)`, or of "
            "`optax_mp.scale_loss(loss, opt_state)`. If nothing is computed in "
            "float16, no loss scale is needed; `optax_mp.static_loss_scale` skips "
            "non-finite steps."
        )
