"""Loss scaling as an optax transform, around an optimizer or as a link in a chain."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey, GetAttrKey, tree_map_with_path

from optax_mp._dtypes import at_least_float32
from optax_mp._inner import as_transformation
from optax_mp._jax._choose import choose_step, or_negative_zeros
from optax_mp._leaves import Leaves
from optax_mp._tree import finite_quotients, is_floating
from optax_mp.loss_scale._mark import mark_skipped, register_link
from optax_mp.loss_scale._rule import (
    ScaleCounters,
    ScaleRule,
    adjusted,
    count_up,
    divided,
    start_counters,
)

# Where flax keeps the scales and histories of its fp8 layers.
_OVERWRITE = "_overwrite_with_gradient"

Adjust = Callable[[ScaleCounters, jax.Array], ScaleCounters]


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`.

    The scale is always finite and within its bounds, and a power of two if it starts as
    one and its factors are. Structure, shapes and dtypes never change.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_steps: finite steps in a row, back to 0 when growth is due, an int32
            scalar.
        hysteresis_left: overflows until the scale shrinks, an int32 scalar.
        skipped_in_a_row: steps skipped since the last finite one, an int32 scalar.
        total_skipped: steps skipped since `init`, an int32 scalar.
        last_finite: whether the last step was finite, a bool scalar.
        inner_state: the state of the inner optimizer; empty for a link in a chain.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
        >>> state = tx.init(jnp.ones(2))
        >>> updates, state = tx.update(jnp.array([jnp.inf, 0.0]), state, jnp.ones(2))
        >>> float(state.scale), int(state.total_skipped), bool(state.last_finite)
        (32768.0, 1, False)
    """

    scale: jax.Array
    finite_steps: jax.Array
    hysteresis_left: jax.Array
    skipped_in_a_row: jax.Array
    total_skipped: jax.Array
    last_finite: jax.Array
    inner_state: optax.OptState


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

    Float16 gradients under 6e-8 are lost, so the loss is multiplied by a scale (see
    `value_and_grad` and `scale_loss`) and the gradients are divided by it here, in
    float32 and by the scale that made them. Where a gradient is infinite or NaN, also
    one that only unscaling makes so, nothing moves: params, the whole inner state and
    its counts and keys are bitwise what they were, and the scale shrinks. After
    `growth_interval` finite steps in a row the scale grows.

    With `inner`, all of this holds for any optimizer. Without, this is a link for
    `optax.chain`, which can only hand zeros on: they are negative zeros, by which a
    `mixed_precision` further on knows a skipped step and stands still, too. Other
    optimizers see zeros, on which moments decay and counts go on, and so does a
    `mixed_precision` that finds no master to hold, all params being float32. So
    wrapping is the stronger form, and the one for params that are sharded under
    `shard_map`, where no rank can see the whole mark.

    Args:
        inner: the optimizer; or None for a link in a chain.
        init_scale: the scale to start from.
        growth_interval: finite steps in a row after which the scale grows.
        growth_factor: by what it grows, over 1.
        backoff_factor: by what it shrinks, under 1.
        min_scale: where it stops to shrink; may be under 1.
        max_scale: growth that would pass this is not taken.
        hysteresis: overflows before it shrinks, from there on at each. Refilled when
            the scale grows, as in Megatron-LM, not by every finite step.
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
        >>> int(state.total_skipped), float(state.scale), float(params["w"][0])
        (3, 8192.0, 1.0)

    References:
        Micikevicius et al., Mixed Precision Training, 2018,
        https://arxiv.org/abs/1710.03740
    """
    rule = ScaleRule(
        "dynamic_loss_scale",
        growth_interval,
        growth_factor,
        backoff_factor,
        min_scale,
        max_scale,
        hysteresis,
    )
    rule.check_start("init_scale", init_scale)

    def adjust(counters: ScaleCounters, finite: jax.Array) -> ScaleCounters:
        return adjusted(rule, counters, finite)

    return _scaling(inner, rule, init_scale, adjust, axis_name)


def static_loss_scale(
    inner: optax.GradientTransformation | None = None,
    scale: float = 1.0,
    *,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Unscale gradients by a constant and skip steps with non-finite ones.

    `dynamic_loss_scale` with a scale that stays; with the default of 1 it just skips.

    Args:
        inner: the optimizer; or None for a link in a chain.
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
        >>> updates["w"].tolist(), int(state.total_skipped)
        ([-0.0, -0.0], 1)
    """
    if isinstance(inner, (int, float)):
        raise TypeError(
            f"static_loss_scale: `inner` is a {type(inner).__name__}, expected an "
            "optax gradient transformation; a scale goes by keyword: "
            f"`scale={inner!r}`."
        )
    rule = ScaleRule(
        "static_loss_scale",
        min_scale=scale,
        max_scale=scale,
        names=(("min_scale", "scale"), ("max_scale", "scale")),
    )

    def stay(counters: ScaleCounters, finite: jax.Array) -> ScaleCounters:
        steps = jnp.where(finite, count_up(counters.finite_steps), 0)
        return counters._replace(finite_steps=steps)

    return _scaling(inner, rule, scale, stay, axis_name)


def _scaling(
    inner: optax.GradientTransformation | None,
    rule: ScaleRule,
    init_scale: float,
    adjust: Adjust,
    axis_name: Any,
) -> optax.GradientTransformationExtraArgs:
    wrapped = None if inner is None else as_transformation(inner, rule.caller)

    def init_fn(params: optax.Params) -> LossScaleState:
        trained = _hide_overwritten(params)
        return LossScaleState(
            *start_counters(rule, init_scale),
            skipped_in_a_row=jnp.int32(0),
            total_skipped=jnp.int32(0),
            last_finite=jnp.array(True),
            inner_state=wrapped.init(trained) if wrapped else optax.EmptyState(),
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaleState]:
        _check_arguments(rule.caller, updates, state, params)
        scaled = _hide_overwritten(updates) if wrapped else updates
        finite = finite_quotients(scaled, state.scale)
        if axis_name is not None:
            finite = lax.pmin(finite.astype(jnp.int32), axis_name) == 1
        grads = divided(scaled, state.scale)
        if wrapped is None:
            out = mark_skipped(finite, grads)
            inner_state = state.inner_state
        else:
            if extra_args.get("grad") is not None:
                hidden = _hide_overwritten(extra_args["grad"])
                extra_args["grad"] = divided(hidden, state.scale)
            trained = _hide_overwritten(params)

            def step(inner_state: Any, update: Any = wrapped.update) -> Any:
                return update(grads, inner_state, trained, **extra_args)

            out, inner_state = choose_step(finite, step, state.inner_state)
            out = _overwrite(out, finite, updates, params)
        counters = ScaleCounters(state.scale, state.finite_steps, state.hysteresis_left)
        return out, LossScaleState(
            *adjust(counters, finite),
            skipped_in_a_row=jnp.where(finite, 0, count_up(state.skipped_in_a_row)),
            total_skipped=jnp.where(
                finite, state.total_skipped, count_up(state.total_skipped)
            ),
            last_finite=finite,
            inner_state=inner_state,
        )

    if wrapped is None:
        register_link(update_fn)
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_arguments(caller: str, updates: Any, state: Any, params: Any) -> None:
    if not isinstance(state, LossScaleState):
        raise TypeError(
            f"{caller}: `state` is a {type(state).__name__}, expected the "
            "LossScaleState that `init` of this transform returns."
        )
    # `optax.lookahead` has two copies of the params for one of gradients.
    if params is not None and not isinstance(params, optax.LookaheadParams):
        leaves = Leaves.of(params, caller=caller, name="`params`")
        leaves.match(updates, "the gradients")


def _is_overwritten(path: tuple[Any, ...]) -> bool:
    return any(
        _OVERWRITE in (getattr(key, "key", None), getattr(key, "name", None))
        for key in path
        if isinstance(key, (DictKey, GetAttrKey))
    )


def _hide_overwritten(tree: Any) -> Any:
    return tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if _is_overwritten(path) else leaf, tree
    )


def _overwrite(out: Any, finite: jax.Array, grads: Any, params: Any) -> Any:
    """Fill in the updates that put the gradient in the place of the param."""
    leaves = Leaves.of(grads, caller="dynamic_loss_scale", name="the gradients")
    if not any(map(_is_overwritten, leaves.paths)):
        return out
    if params is None:
        raise ValueError(
            "dynamic_loss_scale: `params` is None, expected the current params, since "
            f"leaves under {_OVERWRITE!r} are to be overwritten; call "
            "`tx.update(grads, state, params)`."
        )
    filled = leaves.match(out, "the updates of `inner`")
    params = leaves.match(params, "`params`")
    for i, (path, grad) in enumerate(zip(leaves.paths, leaves.values, strict=True)):
        if _is_overwritten(path):
            wide = at_least_float32(grad.dtype) if is_floating(grad) else grad.dtype
            change = jnp.asarray(grad, wide) - jnp.asarray(params[i], wide)
            filled[i] = or_negative_zeros(finite, change)
    return leaves.unflatten(filled)
