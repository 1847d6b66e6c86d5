"""Loss scaling as an optax transform, around an optimizer or as a link in a chain."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp._arguments import check_own_state
from optax_mp._choose import choose_step
from optax_mp._context import Transformation
from optax_mp._inner import (
    as_transformation,
    check_gradients,
    copy_shared,
    update_inner,
)
from optax_mp._jax._arrays import is_traced
from optax_mp.scaling._overwrite import (
    hand_on_overwritten,
    hide_overwritten,
    update_overwritten,
)
from optax_mp.scaling._rule import ScaleRule, adjust, as_count, check_settings, count_up
from optax_mp.scaling._state import LossScaleState, warn_unless_scaled
from optax_mp.scaling._unscale import ALL_FINITE, divide, mark_skipped, unscale

# Takes the state and whether gradients were finite, and returns it with new counters.
Adjust = Callable[[LossScaleState, jax.Array], LossScaleState]


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
    counts and PRNG keys keep their bits, and the scale shrinks. After
    `growth_interval` finite steps in a row the scale grows.

    Without `inner` this is a link for `optax.chain`, which is weaker: in a skipped step
    it can only hand on zeros. A `mixed_precision` after it recognises them (they are
    negative zeros) and skips the step as well. Any other optimizer takes a step with
    zero gradients, in which moments decay and counts go on. Under `shard_map` with
    sharded params pass `inner`: no rank sees the gradients of the others.

    If gradients lack micro-batches that `gradient_accumulator` dropped, pass
    `dropped_count` to `update`: the step is taken, and the scale shrinks all the same.

    Leaves under flax's `_overwrite_with_gradient` (fp8 scales) are neither unscaled nor
    checked nor optimized: the wrapper's update brings each of them to its gradient, as
    nearly as one addition can. A link hands their gradients on as they are, and warns:
    an optimizer after it would move them.

    Args:
        inner: the optimizer; None for a link in a chain.
        init_scale: the scale to start from.
        growth_interval: finite steps in a row after which the scale grows.
        growth_factor: the factor by which it grows, greater than 1.
        backoff_factor: the factor by which it shrinks, less than 1.
        min_scale: its lower bound; may be less than 1.
        max_scale: its upper bound; growth that would pass it does not happen.
        hysteresis: overflows until the scale shrinks; from then on it shrinks at each.
            Refilled when growth is due, as in Megatron-LM, not by every finite step.
        axis_name: the mapped axes over which ranks must agree, under `shard_map` or
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
    counters = start, 0, hysteresis
    return _loss_scaling(inner, caller, counters, partial(adjust, rule), axis_name)


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
        axis_name: the mapped axes over which ranks must agree.

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

    # The scale stays, but the state still says how many steps in a row were finite.
    def count_finite(state: LossScaleState, finite: jax.Array) -> LossScaleState:
        finite_count = jnp.where(finite, count_up(state.finite_count), 0)
        return state._replace(finite_count=finite_count)

    counters = float(scale), 0, 1
    return _loss_scaling(inner, caller, counters, count_finite, axis_name)


def _loss_scaling(
    inner: Any, caller: str, start: tuple[Any, ...], count: Adjust, axis_name: Any
) -> optax.GradientTransformationExtraArgs:
    wrapped: Any = None if inner is None else as_transformation(inner, caller)

    def init_fn(params: optax.Params) -> LossScaleState:
        # `inner` never updates overwritten leaves, so it needs no moments for them.
        inner_params = hide_overwritten(params)
        scale, *counts = start
        inner_state = wrapped.init(inner_params) if wrapped else optax.EmptyState()
        return LossScaleState(
            jnp.float32(scale),
            *[jnp.int32(as_count(n)) for n in (*counts, 0, 0)],
            last_finite=jnp.array(True),
            inner_state=copy_shared(inner_state, inner_params),
            nonfinite_index=jnp.int32(-1),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScaleState]:
        check_own_state(state, LossScaleState, caller)
        check_gradients(params, updates, caller)
        if is_traced(state.scale) and start[0] != 1:
            warn_unless_scaled(caller, "divides the gradients")
        # Divided by the scale that the loss was multiplied by. Divided by the next one,
        # a step after which the scale grows would have half its size.
        grads, bad_index = unscale(hide_overwritten(updates), state.scale)
        dropped_count = extra_args.pop("dropped_count", None)
        is_complete = True if dropped_count is None else dropped_count == 0
        if axis_name is not None:
            # A rank that skipped a step alone would have other params from then on.
            bad_index = lax.pmin(bad_index, axis_name)
            if dropped_count is not None:
                is_complete = lax.pmax(dropped_count, axis_name) == 0
        finite = bad_index == ALL_FINITE
        new_state = count(state, finite & is_complete)
        new_state = _count_skipped(new_state, finite, bad_index)
        if wrapped is None:
            # The links that follow run in any case, so mark the gradients for them.
            marked = mark_skipped(finite, grads)
            return hand_on_overwritten(marked, updates, caller), new_state
        if extra_args.get("grad") is not None:
            # A line search compares it with the updates and the unscaled loss.
            hidden = hide_overwritten(extra_args["grad"])
            extra_args["grad"] = divide(hidden, state.scale)
        inner_params = hide_overwritten(params)

        def step(inner_state: Any, extra_args: dict[str, Any]) -> Any:
            out, inner_state = update_inner(
                wrapped, grads, inner_state, inner_params, extra_args, caller
            )
            return update_overwritten(out, updates, params, caller), inner_state

        # In a skipped step the updates are negative zeros, and the state stays.
        out, inner_state = choose_step(finite, step, state.inner_state, extra_args)
        return out, new_state._replace(inner_state=inner_state)

    return Transformation.around(caller, wrapped, init_fn, update_fn, is_leafwise=True)


def _count_skipped(
    state: LossScaleState, finite: jax.Array, bad_index: jax.Array
) -> LossScaleState:
    """Return the state with what it says of skipped steps, after one more step."""
    total = state.total_skipped_count
    return state._replace(
        skipped_count=jnp.where(finite, 0, count_up(state.skipped_count)),
        total_skipped_count=jnp.where(finite, total, count_up(total)),
        last_finite=finite,
        nonfinite_index=jnp.where(finite, state.nonfinite_index, bad_index),
    )
