"""Loss scaling as an optax transform, around an optimizer or as a link in a chain."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp._jax._arrays import is_traced
from optax_mp._warnings import event_counts, warn, warn_unless_scaled
from optax_mp.scaling._rule import LARGEST_COUNT, ScaleRule, adjust, check_settings
from optax_mp.scaling._state import LossScaleState
from optax_mp.scaling._unscale import (
    ALL_FINITE,
    divide,
    hand_on,
    hide_overwritten,
    unscale,
    update_overwritten,
)
from optax_mp.trees._tree import all_finite, copy_shared
from optax_mp.wrappers._choose import choose_step
from optax_mp.wrappers._context import Transformation
from optax_mp.wrappers._inner import (
    as_transformation,
    check_gradients,
    check_own_state,
    update_inner,
)
from optax_mp.wrappers._mistakes import explain_keywords


@explain_keywords(
    enabled="leave `dynamic_loss_scale` out where nothing is float16",
    scale="pass `init_scale`",
)
def dynamic_loss_scale(
    inner: optax.GradientTransformation | None = None,
    *,
    init_scale: float = 2.0**16,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float = 2.0**-14,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Unscale gradients, skip steps with non-finite ones, and adapt the scale.

    For float16, where gradients under 6e-8 become 0. Put it around the optimizer, and
    take gradients of the scaled loss, with `value_and_grad` or `scale_loss`. Each
    update divides them by the scale, in float32. If one of them is infinite or NaN, or
    becomes so when it is divided, the step is skipped entirely: params, inner state,
    counts and PRNG keys keep their bits, but for the payload of a NaN, and the scale
    shrinks. After
    `growth_interval` finite steps in a row the scale grows.

    Pass the unscaled loss, as `tx.update(grads, state, params, value=loss)`: if it is
    not finite either, the model or its data is to blame, and the skipped step does not
    lower the scale. Without it, as with torch's `GradScaler`, one bad batch in twenty
    lowers the scale to `min_scale`, where small gradients are lost.

    Without `inner` this is a link for `optax.chain`, which is weaker: in a skipped step
    it can only hand on zeros. A `mixed_precision` after it recognises them (they are
    negative zeros) and skips the step as well. Any other optimizer takes a step with
    zero gradients: moments decay and counts go on. Under `shard_map` with
    sharded params pass `inner`: no rank sees the gradients of the others.

    If gradients lack micro-batches that `gradient_accumulator` dropped, pass
    `dropped_count` to `update`: the step is taken and keeps the scale, and the count of
    finite steps restarts. If all were dropped, the gradients are NaN: the step is
    skipped, and the scale shrinks.

    Leaves under flax's `_overwrite_with_gradient` (fp8 scales) are neither unscaled nor
    checked nor optimized: the wrapper's update brings each of them to its gradient, as
    nearly as one addition can. A link hands their gradients on as they are, and warns:
    an optimizer after it would move them.

    Args:
        inner: the optimizer; None for a link in a chain.
        init_scale: the scale to start from.
        growth_interval: finite steps in a row until the scale grows.
        growth_factor: multiplies the scale when it grows; greater than 1.
        backoff_factor: multiplies it when it shrinks; less than 1.
        min_scale: its lower bound; may be less than 1.
        max_scale: its upper bound; growth that would pass it does not happen.
        hysteresis: overflows until the scale shrinks; from then on it shrinks at each.
            Refilled when growth is due, as in Megatron-LM, not by every finite step.
        axis_name: the mapped axes of ranks that must agree, under `shard_map` or
            `pmap`. Under plain `jit` sharded gradients need nothing.

    Returns:
        The transformation. Its updates have the dtype that `inner` gives to float32
        gradients.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if `inner` is not a gradient transformation.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(optax.adam(1e-3)))
        >>> params = {"w": jnp.ones(2, jnp.float16)}
        >>> state = tx.init(params)
        >>> grad = optax_mp.value_and_grad(lambda p: (p["w"] * 3e4).sum())
        >>> for _ in range(3):
        ...     loss, grads = grad(state, params)
        ...     updates, state = tx.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> int(state.total_skipped_count), float(state.scale), float(params["w"][0])
        (3, 8192.0, 1.0)

    References:
        Micikevicius et al., Mixed Precision Training, 2018,
        https://arxiv.org/abs/1710.03740
    """
    rule = ScaleRule(
        growth_interval, growth_factor, backoff_factor, min_scale, max_scale, hysteresis
    )
    caller = "dynamic_loss_scale"
    # Alone first: the errors on two of them show both.
    check_settings(caller, **rule._asdict(), init_scale=init_scale)
    low, start, high = map(float, (min_scale, init_scale, max_scale))
    if not low <= start <= high:
        raise ValueError(
            f"{caller}: expected `init_scale` to be a scale from `min_scale` {low} to "
            f"`max_scale` {high}, got {start}; change one of these."
        )
    return _loss_scaling(inner, caller, start, rule, axis_name)


@explain_keywords()
def static_loss_scale(
    inner: optax.GradientTransformation | None = None,
    scale: float = 1.0,
    *,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Unscale gradients by a constant and skip steps with non-finite ones.

    Like `dynamic_loss_scale` with a constant scale. By default, 1, it only skips steps.

    Args:
        inner: the optimizer; None for a link in a chain.
        scale: the loss scale.
        axis_name: the mapped axes of ranks that must agree.

    Returns:
        The transformation.

    Raises:
        ValueError: if the scale is not positive and finite.
        TypeError: if `inner` is not a gradient transformation.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.static_loss_scale(optax.adam(1e-3))
        >>> params = {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([jnp.nan, 0])}, state, params)
        >>> updates["w"].tolist(), int(state.total_skipped_count)
        ([-0.0, -0.0], 1)
    """
    caller = "static_loss_scale"
    check_settings(caller, scale=scale)
    # No factor moves it, and the count of overflows ends with the run.
    rule = ScaleRule(LARGEST_COUNT, 1.0, 1.0, scale, scale, hysteresis=LARGEST_COUNT)
    return _loss_scaling(inner, caller, float(scale), rule, axis_name)


def _loss_scaling(
    inner: Any, caller: str, init_scale: float, rule: ScaleRule, axis_name: Any
) -> optax.GradientTransformationExtraArgs:
    wrapped: Any = None if inner is None else as_transformation(inner, caller)

    def init_fn(params: optax.Params) -> LossScaleState:
        # `inner` never updates overwritten leaves, so it needs no moments for them.
        inner_params = hide_overwritten(params)
        inner_state = wrapped.init(inner_params) if wrapped else optax.EmptyState()
        return LossScaleState(
            scale=jnp.float32(init_scale),
            finite_count=jnp.int32(0),
            hysteresis_left=jnp.int32(min(rule.hysteresis, LARGEST_COUNT)),
            skipped_count=jnp.int32(0),
            total_skipped_count=jnp.int32(0),
            last_finite=jnp.array(True),
            inner_state=copy_shared(inner_state, inner_params),
            nonfinite_index=jnp.int32(-1),
            dropped_count=jnp.int32(0),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScaleState]:
        check_own_state(state, LossScaleState, caller)
        check_gradients(params, updates, caller)
        if is_traced(state.scale) and init_scale != 1:
            warn_unless_scaled(caller, "divides the gradients")
        # Divided by the scale that the loss was multiplied by. Divided by the next one,
        # a step after which the scale grows would have half its size.
        grads, bad_index = unscale(hide_overwritten(updates), state.scale)
        evidence = _evidence(bad_index, extra_args, caller)
        if axis_name is not None:
            # A rank that skipped a step by itself would have other params from then on.
            evidence = lax.pmin(evidence, axis_name)
        new_state = _after_step(state, evidence, rule)
        finite = new_state.last_finite
        if wrapped is None:
            # The links that follow run in any case, so mark the gradients for them.
            return hand_on(finite, grads, updates, caller), new_state
        if extra_args.get("grad") is not None:
            # A line search compares it with the updates and the unscaled loss.
            hidden = hide_overwritten(extra_args["grad"])
            extra_args["grad"] = divide(hidden, state.scale)

        def step(inner_state: Any, extra_args: dict[str, Any]) -> Any:
            args = grads, inner_state, hide_overwritten(params)
            out, inner_state = update_inner(wrapped, caller, *args, **extra_args)
            return update_overwritten(out, updates, params, caller), inner_state

        # In a skipped step the updates are negative zeros, and the state stays.
        out, inner_state = choose_step(finite, step, state.inner_state, extra_args)
        return out, new_state._replace(inner_state=inner_state)

    return Transformation.of(caller, init_fn, update_fn)


# What is known of a step, such that ranks agree by the minimum of each int32 scalar:
# the first leaf that is not finite, or `ALL_FINITE`; how many micro-batches were
# dropped, negated, or None; and whether the loss is finite, or None.
_Evidence = tuple[jax.Array, jax.Array | None, jax.Array | None]


def _evidence(bad_index: jax.Array, extra_args: Any, caller: str) -> _Evidence:
    """Take from the extra arguments of an update what they say of the step."""
    dropped_count = extra_args.pop("dropped_count", None)
    call = "pass `tx.update(grads, state, params, dropped_count=dropped_count)`."
    for name in extra_args:
        if "dropped" in name:
            raise TypeError(
                f"{caller}: expected the number of dropped micro-batches as "
                f"`dropped_count`, got `{name}`; {call}"
            )
    if dropped_count is not None:
        # If all were dropped, the loss is NaN, whatever the reason.
        return bad_index, -jnp.asarray(dropped_count, jnp.int32), None
    if is_traced(bad_index) and event_counts()["drops micro-batches"]:
        warn(
            f"{caller}: `gradient_accumulator` may drop micro-batches, and "
            f"`dropped_count` is not given, so the scale grows all the same; {call}"
        )
    value = extra_args.get("value")
    is_finite = None
    if value is not None:  # `float(loss)` is not an array
        is_finite = all_finite(jax.tree.map(jnp.asarray, value)).astype(jnp.int32)
    return bad_index, None, is_finite


def _after_step(
    state: LossScaleState, evidence: _Evidence, rule: ScaleRule
) -> LossScaleState:
    """Return the state after a step, without a new `inner_state`."""
    bad_index, minus_dropped, loss_finite = evidence
    complete = finite = bad_index == ALL_FINITE
    dropped_count = state.dropped_count
    if minus_dropped is not None:
        # Some may be bad data. If all of them are bad, the gradients are NaN.
        complete = finite & (minus_dropped == 0)
        dropped_count = dropped_count - minus_dropped
    # The scale is not to blame for a loss that is not finite.
    overflowed = ~finite if loss_finite is None else ~finite & (loss_finite == 1)
    skipped, total = state.skipped_count, state.total_skipped_count
    return LossScaleState(
        *adjust(rule, state[:3], complete, overflowed),
        skipped_count=jnp.where(finite, 0, optax.safe_increment(skipped)),
        total_skipped_count=jnp.where(finite, total, optax.safe_increment(total)),
        last_finite=finite,
        inner_state=state.inner_state,
        nonfinite_index=jnp.where(finite, state.nonfinite_index, bad_index),
        dropped_count=dropped_count,
    )
