"""The state of a loss scale, and how to find it in an optimizer state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from optax_mp._arguments import check_opt_state, warn_unless_state
from optax_mp._boxes import plain_state
from optax_mp._nesting import check_nesting
from optax_mp._states import check_classes, find_states
from optax_mp._warnings import count_event


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`.

    The scale is always finite and within its bounds, and a power of two if it starts as
    one and its factors are. Structure, shapes and dtypes never change.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_count: finite steps in a row since growth was last due, an int32 scalar.
        hysteresis_left: overflows until the scale shrinks, an int32 scalar.
        skipped_count: steps skipped since the last finite one, an int32 scalar.
        total_skipped_count: steps skipped since `init`, an int32 scalar.
        last_finite: whether the last step was finite, a bool scalar.
        inner_state: the state of the inner optimizer; empty for a link in a chain.
        nonfinite_index: which leaf was the first that was not finite in the last
            skipped step, as an index into the leaves of the gradients (None counts as a
            leaf), an int32 scalar; -1 if no step was skipped. `check_loss_scale` names
            the leaf.

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
    state = loss_scale_state(plain_state(opt_state), "loss_scale")
    if state is None:
        return jnp.float32(1)
    count_event("scales its loss")  # by hand
    return state.scale


def loss_scale_state(opt_state: Any, caller: str) -> LossScaleState | None:
    """Return the one loss-scale state in `opt_state`, or None."""
    check_opt_state(opt_state, caller)
    check_nesting(opt_state, caller)
    found = find_states(opt_state, LossScaleState)
    if len(found) > 1:
        places = " and ".join("opt_state" + keystr(path) for path, _ in found)
        raise ValueError(
            f"{caller}: `opt_state` holds {len(found)} loss scales, at {places}, "
            "expected one, because a loss is multiplied by one scale; put a single "
            "dynamic_loss_scale around the whole optimizer."
        )
    if not found:
        check_classes(opt_state, caller)
        warn_unless_state(opt_state, caller)
        return None
    return found[0][1]
