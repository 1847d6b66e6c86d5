"""with_average: a float32 average of the weights, in the optimizer state."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import optax
from jax import lax

from optax_mp._dtypes import at_least_float32, saturating_cast
from optax_mp._jax._arrays import is_traced, to_device_tree
from optax_mp.masters._access import read_arguments, weights_of
from optax_mp.masters._storage import AverageState, MixedPrecisionState
from optax_mp.scaling._rule import check_number
from optax_mp.scaling._state import LossScaleState
from optax_mp.scaling._unscale import is_unmarked
from optax_mp.trees._leaves import Leaves, is_absent
from optax_mp.trees._states import check_classes, find_states
from optax_mp.trees._tree import copy_shared, is_inexact
from optax_mp.wrappers._context import Choice, Transformation, context_of
from optax_mp.wrappers._inner import (
    apply_updates,
    as_transformation,
    check_own_state,
    require_params,
    update_inner,
)
from optax_mp.wrappers._mistakes import check_whole_number

_CALLER = "with_average"
# How far the average may be behind by default, as a share of its distance: half of it.
_MOST_AT_ONCE = 0.01
# From the weights after a step, and the old averages, to the new ones.
Advance = Callable[[Any, list[Any]], list[Any]]


def with_average(
    inner: optax.GradientTransformation,
    decay: float,
    *,
    every: int | None = None,
    start: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Keep an exponential moving average of the weights in the optimizer state.

    Evaluate with `average_params(opt_state, params)`. The average is float32, of the
    masters where there are any. An average in bfloat16 does not move: at a decay of
    0.999 a step of it is less than half a unit in the last place.

    A step that a loss scale or `optax.apply_if_finite` skips does not count, and
    `optax.MultiSteps` counts steps of the optimizer. Put `with_average` around all of
    these. Only `zero1` and `offload` may be around it, and `optax.masked` or
    `optax.partition` for a part of the params: integers and params that a mask hides
    have no average. `offload` around it keeps the average in host memory as well. If
    groups of a partition skip steps separately, a step counts only if all groups take
    it. For separate counts, put `with_average` inside each group.

    Args:
        inner: any optax optimizer or chain.
        decay: the share of the average that one step keeps, such as 0.999.
        every: the number of steps between two moves, each by `decay**every`. By default
            the largest for which `every * (1 - decay)` is at most 0.01. The average is
            then off by about 0.5% of its distance from the weights, and most steps have
            no cost. With 1, it is `optax.incremental_update` of float32 weights.
        start: the number of steps until averaging starts. Until then the average is a
            copy of the weights, made every `every` steps and at step `start`. The
            first weights of a model that is trained from scratch are best left out.

    Returns:
        The transformation.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or an argument is of the
            wrong type.
        ValueError: if `decay` is not at least 0 and less than 1, or `every` or `start`
            cannot be.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.with_average(
        ...     optax_mp.mixed_precision(optax.sgd(1.0)), decay=0.99
        ... )
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update({"w": jnp.full(2, 0.001)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> average = optax_mp.average_params(state, params)
        >>> [round(float(x["w"][0]), 3) for x in (params, average)]
        [0.898, 0.963]

    References:
        Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging,
        1992, https://doi.org/10.1137/0330046
    """
    inner = as_transformation(inner, _CALLER)
    expected = "a number of at least 0 and less than 1, such as 0.999"
    check_number(f"{_CALLER}: `decay`", decay, expected, lambda x: 0 <= x < 1)
    if every is None:
        # 1 - 0.999 is a little more than 0.001.
        every = max(1, int(_MOST_AT_ONCE / (1 - decay) * (1 + 1e-9)))
    every = check_whole_number(f"{_CALLER}: `every`", every)
    start = check_whole_number(f"{_CALLER}: `start`", start, 0)
    step_size = 1 - float(decay) ** every

    def init_fn(params: optax.Params) -> AverageState:
        inner_state = copy_shared(inner.init(params), params)
        leaves = Leaves.of(params, caller=_CALLER)
        average = _copies(weights_of(inner_state, leaves), leaves)
        return AverageState(average, jnp.zeros((), jnp.int32), inner_state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, AverageState]:
        require_params(params, _CALLER)
        check_own_state(state, AverageState, _CALLER)
        args = updates, state.inner_state, params
        changes, inner_state = update_inner(inner, _CALLER, *args, **extra_args)
        # An earlier link of a chain may also skip the step.
        taken = is_unmarked(updates, extra_args) & context_of(extra_args).proceed
        taken &= _was_taken(state.inner_state, inner_state)
        count = jnp.asarray(optax.safe_increment(state.step_count))
        is_due = every == 1 or (count - start) % every == 0
        leaves = Leaves.of(apply_updates(params, changes), caller=_CALLER)
        old = leaves.match(state.average, "the average in the state")

        def advance(source: Any, old: list[Any]) -> list[Any]:
            weights = weights_of(source[1], replace(leaves, values=source[0]))
            return list(map(blend, weights, old))

        def blend(weight: Any, average: Any) -> Any:
            if is_absent(average):
                return average
            weight = weight.astype(average.dtype)
            moved: Any = optax.incremental_update(weight, average, step_size)
            return lax.select(count <= start, weight, moved) if start else moved

        # Only what is read, since a loop takes all of it.
        pairs = zip(leaves.values, old, strict=True)
        read = [None if is_absent(x) else param for param, x in pairs]
        states = [x for _, x in find_states(inner_state, MixedPrecisionState)]
        source = read, [x._replace(inner_state=()) for x in states]
        average = leaves.unflatten(_run(advance, source, old, taken & is_due))
        count = count if taken is True else jnp.where(taken, count, state.step_count)
        return changes, AverageState(average, count, inner_state)

    return Transformation.of(_CALLER, init_fn, update_fn)


def _copies(weights: Sequence[Any], params: Leaves) -> Any:
    """Return an average that is equal to the weights."""

    def copy(weight: Any) -> Any:
        if not is_inexact(weight):
            return optax.MaskedNode()
        return jnp.array(weight, at_least_float32(weight.dtype), copy=True)

    return params.unflatten(map(copy, weights))


def _was_taken(before: Any, after: Any) -> Choice:
    """Return whether wrappers inside took a step, as their states say."""
    taken: Choice = True
    for _, state in find_states(after, (LossScaleState, optax.ApplyIfFiniteState)):
        taken &= state.last_finite
    steps = [find_states(x, optax.MultiStepsState) for x in (before, after)]
    for (_, old), (_, new) in zip(*steps, strict=True):
        taken &= new.gradient_step != old.gradient_step
    return taken


def _run(advance: Advance, source: Any, old: list[Any], due: Choice) -> list[Any]:
    """Return the result of `advance(source, old)` if a move is due, else `old`."""
    if not is_traced(due):
        return advance(source, old) if due else old

    # A loop of one round or none overwrites the average, and a `lax.cond` would copy
    # it. The barrier keeps what the loop computes, such as float32 weights, from being
    # computed before it in each step, and masters in host memory from being copied.
    def body(k: Any, old: list[Any]) -> list[Any]:
        return advance(lax.optimization_barrier((k, source))[1], old)

    return lax.fori_loop(jnp.int32(0), jnp.asarray(due).astype(jnp.int32), body, old)


def average_params(
    opt_state: optax.OptState, params: optax.Params, *, in_param_dtypes: bool = False
) -> optax.Params:
    """Return the params with the average of `with_average` in their place.

    Leaves without an average are returned as they are in `params`. Of several averages
    of one param, the outermost counts; pass `opt_state.inner_state` for the next. An
    average in host memory comes back in device memory.

    Args:
        opt_state: any optimizer state, with `with_average` at any depth of wrappers. Or
            an `nnx.Optimizer`.
        params: the current params. Or the `nnx.Module` that the optimizer trains.
        in_param_dtypes: whether to cast the average to the dtypes of the params. By
            default it is float32.

    Returns:
        A tree like `params`; for NNX an `nnx.State` of arrays, for `nnx.update`. It
        shares no array with `opt_state` or `params`.

    Raises:
        TypeError: if `opt_state` is no optimizer state, or comes second.
        ValueError: if the state holds no average, or the average of other params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.with_average(optax.adam(1e-3), decay=0.999)
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> average = optax_mp.average_params(tx.init(params), params)
        >>> average["w"].dtype.name
        'float32'
    """
    caller = "average_params"
    opt_state, params, leaves = read_arguments(opt_state, params, caller)
    found = find_states(opt_state, AverageState)
    if not found:
        check_classes(opt_state, caller)
        raise ValueError(
            f"{caller}: expected `opt_state` of an optimizer with "
            "optax_mp.with_average in it, got one without an AverageState; wrap the "
            "optimizer, and convert its state with `optax_mp.convert_opt_state`."
        )
    values = list(leaves.values)
    # The innermost first, so that the outermost counts.
    for _, state in reversed(found):
        for i, x in enumerate(leaves.match(state.average, "the average")):
            if not is_absent(x):
                x = to_device_tree(x)
                dtype = leaves.values[i].dtype
                values[i] = saturating_cast(x, dtype) if in_param_dtypes else x
    return copy_shared(leaves.unflatten(values), (opt_state, params))
