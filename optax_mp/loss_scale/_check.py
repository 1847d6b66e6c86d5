"""A check for the training loop, outside of `jit`: were too many steps skipped?"""

from typing import Any

import jax
import optax

from optax_mp._tree import nonfinite_paths
from optax_mp.loss_scale._state import loss_scale_state


def check_loss_scale(
    opt_state: optax.OptState, max_skipped: int = 30, *, grads: Any = None
) -> None:
    """Raise if too many steps in a row were skipped.

    Call it every hundred steps or so, outside `jit`, because it waits for the values.
    Overflows stop when the scale is low enough; a NaN from the model itself does not.
    With the defaults, 30 skipped steps take the scale from 65536 down to `min_scale`.

    Args:
        opt_state: a state with a loss scale in it, at any depth of wrappers.
        max_skipped: how many skipped steps in a row are accepted.
        grads: the last gradients, to name the leaves that are not finite.

    Raises:
        FloatingPointError: if more than `max_skipped` steps in a row were skipped; with
            the counters, the leaves, and the likely cause.
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
    state = jax.device_get(state._replace(inner_state=()))
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
