"""Loss scaling as an optax transform, around an optimizer or as a link in a chain."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp.core.scaling import _rule, _unscale
from optax_mp.core.scaling._state import BAD_LOSS, LossScaleState
from optax_mp.core.trees._tree import all_finite, copy_shared
from optax_mp.core.wrappers import _arguments, _choose, _protocol


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

    Use it for float16, in which gradients below 6e-8 become 0. Put it around the
    optimizer, and take gradients of the scaled loss, with `value_and_grad` or
    `scale_loss`. Each update divides them by the scale, in float32. If one of them is
    infinite or NaN, or becomes so when it is divided, the step is skipped entirely:
    params, inner state, counts and PRNG keys keep all their bits (except in a NaN), and
    the scale shrinks. After `growth_interval` finite steps in a row the scale grows.

    Pass the unscaled loss, as `tx.update(grads, state, params, value=loss)`: if it is
    not finite either, the model or its data is to blame, and the skipped step does not
    lower the scale. Without it, as with torch's `GradScaler`, one bad batch in twenty
    lowers the scale to `min_scale`, where small gradients are lost.

    Without `inner` this is a link for `optax.chain`, which is weaker: in a skipped step
    it can only hand on zeros. A `mixed_precision` after it recognises them (they are
    negative zeros) and skips the step as well. Any other optimizer takes a step with
    zero gradients: moments decay and counts increase. Under `shard_map` with sharded
    params pass `inner`: no rank sees the gradients of the others.

    Scales of Flax's fp8 layers, under `_overwrite_with_gradient`, are refused, because
    their "gradients" are the next values of the scales.
    `flax.training.train_state.TrainState` keeps them from the optimizer.

    Args:
        inner: the optimizer; None for a link in a chain.
        init_scale: the scale to start from.
        growth_interval: finite steps in a row until the scale grows.
        growth_factor: multiplies the scale when it grows; greater than 1.
        backoff_factor: multiplies it when it shrinks; less than 1.
        min_scale: its lower bound; may be less than 1.
        max_scale: its upper bound; growth that would pass it does not happen.
        hysteresis: overflows until the scale shrinks; from then on it shrinks at each.
            This number is refilled when growth is due, as in Megatron-LM, not by every
            finite step.
        axis_name: the mapped axes of ranks that must agree, under `shard_map` or
            `pmap`. Under plain `jit`, sharded gradients need none.

    Returns:
        The transformation. Its updates have the dtype that `inner` gives to float32
        gradients.

    Raises:
        ValueError: if a number is out of range; in `update`, if a gradient is the next
            value of an fp8 scale.
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
    rule = _rule.ScaleRule(
        growth_interval, growth_factor, backoff_factor, min_scale, max_scale, hysteresis
    )
    caller = "dynamic_loss_scale"
    # Alone first: the errors on two of them show both.
    _rule.check_settings(caller, **rule._asdict(), init_scale=init_scale)
    low, start, high = map(float, (min_scale, init_scale, max_scale))
    if not low <= start <= high:
        raise ValueError(
            f"{caller}: expected `init_scale` to be a scale from `min_scale` {low} to "
            f"`max_scale` {high}, got {start}; change one of these."
        )
    return _loss_scaling(inner, caller, start, rule, axis_name)


def static_loss_scale(
    inner: optax.GradientTransformation | None = None,
    scale: float = 1.0,
    *,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Unscale gradients by a constant and skip steps with non-finite ones.

    It is like `dynamic_loss_scale` with a constant scale. With the default scale, 1, it
    only skips steps.

    Args:
        inner: the optimizer; None for a link in a chain.
        scale: the loss scale.
        axis_name: the mapped axes of ranks that must agree, under `shard_map` or
            `pmap`.

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
    _rule.check_settings(caller, scale=scale)
    # No factor moves it, and the count of overflows ends with the run.
    rule = _rule.ScaleRule(
        _rule.LARGEST_COUNT, 1.0, 1.0, scale, scale, hysteresis=_rule.LARGEST_COUNT
    )
    return _loss_scaling(inner, caller, float(scale), rule, axis_name)


def _loss_scaling(
    inner: Any, caller: str, init_scale: float, rule: _rule.ScaleRule, axis_name: Any
) -> optax.GradientTransformationExtraArgs:
    wrapped: Any = None if inner is None else _protocol.as_transformation(inner, caller)

    def init_fn(params: optax.Params) -> LossScaleState:
        inner_state = wrapped.init(params) if wrapped else optax.EmptyState()
        return LossScaleState(
            scale=jnp.float32(init_scale),
            finite_count=jnp.int32(0),
            hysteresis_left=jnp.int32(min(rule.hysteresis, _rule.LARGEST_COUNT)),
            skipped_count=jnp.int32(0),
            total_skipped_count=jnp.int32(0),
            last_finite=jnp.array(True),
            inner_state=copy_shared(inner_state, params),
            nonfinite_index=jnp.int32(-1),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScaleState]:
        _arguments.check_own_state(state, LossScaleState, caller)
        _arguments.check_gradients(params, updates, caller)
        # Divided by the scale that the loss was multiplied by. Divided by the next one,
        # a step after which the scale grows would have half its size.
        grads, bad_index = _unscale.unscale(updates, state.scale)
        loss_is_finite = _is_finite(extra_args.get("value"))
        if axis_name is not None:
            # A rank that skipped a step by itself would have other params from then on.
            seen = bad_index, loss_is_finite
            bad_index, loss_is_finite = lax.pmin(seen, axis_name)
        new_state = _after_step(state, bad_index, loss_is_finite, rule)
        finite = new_state.last_finite
        if wrapped is None:
            # The links that follow run in any case, so mark the gradients for them.
            return _choose.hand_on(finite, grads), new_state
        if extra_args.get("grad") is not None:
            # A line search compares it with the updates and the unscaled loss.
            extra_args["grad"] = _unscale.divide(extra_args["grad"], state.scale)

        def step(inner_state: Any, extra_args: dict[str, Any]) -> Any:
            args = grads, inner_state, params
            return _protocol.update_inner(wrapped, caller, *args, **extra_args)

        # In a skipped step the updates are negative zeros, and the state stays.
        out, inner_state = _choose.choose_step(
            finite, step, state.inner_state, extra_args
        )
        return out, new_state._replace(inner_state=inner_state)

    return _protocol.Transformation.of(caller, init_fn, update_fn)


def _is_finite(loss: Any) -> jax.Array | None:
    """Return whether a loss is finite, as int32 `[]` 0 or 1; None if it is not given.

    int32, as the index of a leaf is, so that ranks agree on both by one minimum.
    """
    if loss is None:
        return None
    # `float(loss)` is not an array.
    return all_finite(jax.tree.map(jnp.asarray, loss)).astype(jnp.int32)


def _after_step(
    state: LossScaleState,
    bad_index: jax.Array,
    loss_is_finite: jax.Array | None,
    rule: _rule.ScaleRule,
) -> LossScaleState:
    """Return the state after a step, without a new `inner_state`.

    Args:
        state: the state before the step.
        bad_index: int32 `[]`, the first gradient that is not finite, or `ALL_FINITE`.
        loss_is_finite: int32 `[]`, 0 or 1; None if it is not known.
        rule: how the scale moves.
    """
    finite = bad_index == _unscale.ALL_FINITE
    # The scale is not to blame for a loss that is not finite.
    overflowed, blamed = ~finite, bad_index
    if loss_is_finite is not None:
        overflowed &= loss_is_finite == 1
        blamed = jnp.where(loss_is_finite == 1, bad_index, BAD_LOSS)
    before = _rule.Counters(state.scale, state.finite_count, state.hysteresis_left)
    after = _rule.adjust(rule, before, finite, overflowed)
    skipped, total = state.skipped_count, state.total_skipped_count
    return state._replace(
        **after._asdict(),
        skipped_count=jnp.where(finite, 0, optax.safe_increment(skipped)),
        total_skipped_count=jnp.where(finite, total, optax.safe_increment(total)),
        last_finite=finite,
        nonfinite_index=jnp.where(finite, state.nonfinite_index, blamed),
    )
