"""with_average: a float32 average of the weights, in the optimizer state."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays
from optax_mp.core.masters import _access
from optax_mp.core.masters._storage import MixedPrecisionState
from optax_mp.core.scaling._rule import check_number
from optax_mp.core.scaling._state import LossScaleState
from optax_mp.core.trees import _states, _tree
from optax_mp.core.trees._leaves import Leaves, is_absent
from optax_mp.core.wrappers import _arguments, _protocol
from optax_mp.core.wrappers._choose import is_unmarked
from optax_mp.core.wrappers._updates import Choice, apply_updates

_CALLER = "with_average"
# From the number of steps taken before this one to the decay of this one.
Schedule = Callable[[jax.Array], Any]


@_states.own_state
class AverageState(NamedTuple):
    """State of `with_average`.

    Its structure, shapes and dtypes never change.

    Attributes:
        average: a tree like the params: float32 for each floating leaf of 32 bits or
            fewer, in the leaf's shape; `optax.MaskedNode()` for integers, bools, keys.
        step_count: int32 `[]`, the number of steps that were taken.
        inner_state: the state of the inner optimizer. Its public fields, such as
            `hyperparams`, are also attributes of this state.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.with_average(optax.adam(1e-3), decay=0.999)
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> state.average["w"].dtype.name, int(state.step_count)
        ('float32', 0)
    """

    average: optax.Params
    step_count: jax.Array
    inner_state: optax.OptState
    __getattr__ = _states.inner_field


def with_average(
    inner: optax.GradientTransformation, decay: float | Schedule
) -> optax.GradientTransformationExtraArgs:
    """Keep an exponential moving average of the weights in the optimizer state.

    Each step moves the average by `1 - decay` of its distance from the weights, as
    `optax.incremental_update` does. Evaluate with `average_params(opt_state, params)`.
    The average is float32. For params that have a master, it is the average of the
    master. An average in bfloat16 would not move: at a decay of 0.999 its step is less
    than half a unit in the last place.

    Put `with_average` around a loss scale, `optax.apply_if_finite` and
    `optax.MultiSteps`: steps that these skip do not count, and with `optax.MultiSteps`
    only the steps of the optimizer do. Only `zero1` and `offload` may be around
    `with_average`, and `optax.masked` or `optax.partition` for a part of the params.
    Integers, and params that a mask hides, have no average. `offload` around it also
    keeps the average in host memory. If groups of a partition skip steps separately, a
    step counts only if all groups take it. For separate counts, put `with_average`
    inside each group.

    Args:
        inner: any optax optimizer or chain.
        decay: the share of the average that one step keeps, such as 0.999; or a
            schedule, as for optax's learning rates: a function of the number of steps
            taken so far, int32 `[]`. A step at a decay of 0 makes the average a copy of
            the weights. To leave out the first weights of a model that is trained from
            scratch, pass `lambda k: jnp.where(k < 1000, 0, 0.999)`, which starts to
            average after 1000 steps.

    Returns:
        The transformation.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or `decay` is not a
            number or a function.
        ValueError: if `decay` is not at least 0 and less than 1.

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
    inner = _protocol.as_transformation(inner, _CALLER)
    if not callable(decay):
        expected = "a number of at least 0 and less than 1, such as 0.999"
        check_number(f"{_CALLER}: `decay`", decay, expected, lambda x: 0 <= x < 1)

    def init_fn(params: optax.Params) -> AverageState:
        inner_state = _tree.copy_shared(inner.init(params), params)
        leaves = Leaves.of(params, caller=_CALLER)
        average = leaves.unflatten(map(_copy, _first_weights(inner_state, leaves)))
        return AverageState(average, jnp.zeros((), jnp.int32), inner_state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, AverageState]:
        _arguments.require_params(params, _CALLER)
        _arguments.check_own_state(state, AverageState, _CALLER)
        args = updates, state.inner_state, params
        changes, inner_state = _protocol.update_inner(
            inner, _CALLER, *args, **extra_args
        )
        # An earlier link of a chain may also skip the step.
        taken = is_unmarked(updates, extra_args)
        taken &= _was_taken(state.inner_state, inner_state, changes)
        leaves = Leaves.of(_after(params, changes), caller=_CALLER)
        weights = _access.weights_of(inner_state, leaves)
        old = leaves.match(state.average, "the average in the state")
        share = _share_at(decay, state.step_count)
        new = [_move(x, y, share, taken) for x, y in zip(old, weights, strict=True)]
        count = jnp.where(
            taken, optax.safe_increment(state.step_count), state.step_count
        )
        return changes, AverageState(leaves.unflatten(new), count, inner_state)

    return _protocol.Transformation.of(_CALLER, init_fn, update_fn)


def _share_at(decay: float | Schedule, count: jax.Array) -> Any:
    """Return the decay of a step, or raise if it cannot be one."""
    if not callable(decay):
        return float(decay)
    share: Any = decay(count)
    if jnp.shape(share) != ():
        raise TypeError(
            f"{_CALLER}: expected the schedule `decay` to return a scalar from 0 to 1, "
            f"got {_arrays.describe(share)}."
        )
    return share


def _first_weights(inner_state: Any, params: Leaves) -> list[Any]:
    """Return the weights given to `init`, each in the dtype and sharding of its master.

    These are not the masters: with `Split`, a param is part of its master only after
    the cast.
    """
    weights = list(params.values)
    for _, state in _states.find_states(inner_state, MixedPrecisionState):
        stored = params.match(state.master_params, "the masters in `opt_state`")
        for i, master in enumerate(stored):
            if not is_absent(master):
                dtype = _dtypes.at_least_float32(
                    master.dtype if _dtypes.is_floating(master) else jnp.float32
                )
                weight = weights[i].astype(dtype)
                weights[i] = _access.put_beside(weight, _arrays.to_device_tree(master))
    return weights


def _after(params: optax.Params, changes: optax.Updates) -> optax.Params:
    """Return the params after a step.

    JAX cannot add an 8-bit float to another dtype, so 8-bit params are added in
    float32.
    """

    def widen(x: Any) -> Any:
        is_narrow = _dtypes.is_floating(x) and _dtypes.bits(x.dtype) < 16
        return x.astype(jnp.float32) if is_narrow else x

    wide, changes = (jax.tree.map(widen, tree) for tree in (params, changes))
    after = apply_updates(wide, changes)
    return jax.tree.map(
        lambda x, param: x.astype(param.dtype) if _dtypes.is_floating(x) else x,
        after,
        params,
    )


def _copy(weight: Any) -> Any:
    """Return an average that is equal to a weight."""
    if not _dtypes.is_inexact(weight):
        return optax.MaskedNode()
    return jnp.array(weight, _dtypes.at_least_float32(weight.dtype), copy=True)


def _move(average: Any, weight: Any, decay: Any, taken: Choice) -> Any:
    """Return the average of a weight after a step."""
    if is_absent(average):
        return average
    if weight.dtype != average.dtype:
        # XLA may drop the cast to 16 bits that is before this one.
        weight = lax.optimization_barrier(weight).astype(average.dtype)
    if _arrays.is_array(decay):
        decay = decay.astype(average.dtype)
    moved: Any = optax.incremental_update(weight, average, 1 - decay)
    # The formula keeps an infinite average, and makes -0.0 a 0.0.
    moved = lax.select(jnp.asarray(decay == 0), weight, moved)
    # XLA writes the result in place of the old average; a `lax.cond` would copy it.
    return moved if taken is True else lax.select(taken, moved, average)


def _was_taken(before: Any, after: Any, changes: Any) -> Choice:
    """Return whether wrappers inside took a step, as their states say.

    Args:
        before: the state inside before the step.
        after: the state inside after it.
        changes: the updates.
    """
    taken: Choice = True
    for _, state in _states.find_states(after, LossScaleState):
        taken &= state.last_finite
    for at, old, new in _both(optax.ApplyIfFiniteState, before, after):
        # After some bad steps it gives up, and its state does not say after how many.
        gave_up = _numbers_differ(old.inner_state, new.inner_state)
        # If it makes all updates, they are zeros in a step that it skips. If it makes
        # only some of them, a NaN shows that it took a step which was not finite.
        gave_up |= ~_tree.all_finite(changes) if at else ~_all_zero(changes)
        taken &= new.last_finite | gave_up
    for _, old, new in _both(optax.MultiStepsState, before, after):
        taken &= new.gradient_step != old.gradient_step
    return taken


def _both(kind: type, before: Any, after: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield path, old and new state for each state of a kind."""
    found = [_states.find_states(x, kind) for x in (before, after)]
    for (at, old), (_, new) in zip(*found, strict=True):
        yield at, old, new


def _numbers_differ(before: Any, after: Any) -> jax.Array:
    """Return whether numbers of two states, such as counts, differ, as bool `[]`.

    Arrays are not compared: keeping both would take as much memory as the state.
    """
    same = []
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        if jnp.shape(new) == ():
            is_nan = (old != old) & (new != new) if _dtypes.is_inexact(new) else False
            same.append(jnp.asarray((old == new) | is_nan))
    return ~_tree.all_true(same)


def _all_zero(updates: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(updates) if _dtypes.is_inexact(x)]
    return _tree.all_true([(x == 0).all() for x in leaves])


def average_params(
    opt_state: optax.OptState, params: optax.Params, *, in_param_dtypes: bool = False
) -> optax.Params:
    """Return the average that `with_average` keeps, as a tree like the params.

    Leaves without an average are those of `params`. If a param has several averages,
    the outermost is returned; pass `opt_state.inner_state` for the next one. An average
    in host memory is copied to device memory.

    Args:
        opt_state: any optimizer state, with `with_average` at any depth of wrappers; or
            an `nnx.Optimizer`.
        params: the current params, or the `nnx.Module` that the optimizer trains.
        in_param_dtypes: whether to cast the average to the dtypes of the params. By
            default it is float32.

    Returns:
        A tree like `params`; for NNX an `nnx.State` of arrays, for `nnx.update`. It
        shares no array with `opt_state` or `params`.

    Raises:
        TypeError: if `opt_state` is not an optimizer state, or is the second argument.
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
    opt_state, params, leaves = _access.read_arguments(opt_state, params, caller)
    found = _states.find_states(opt_state, AverageState)
    if not found:
        _states.check_classes(opt_state, caller)
        raise ValueError(
            f"{caller}: expected `opt_state` of `optax_mp.with_average`, got one "
            "without an AverageState; wrap the optimizer, and convert its state with "
            "`optax_mp.convert_opt_state`."
        )
    values = list(leaves.values)
    # The innermost first, so that the outermost counts.
    for _, state in reversed(found):
        for i, x in enumerate(leaves.match(state.average, "the average")):
            if not is_absent(x):
                x = _arrays.to_device_tree(x)
                dtype = leaves.values[i].dtype
                values[i] = _dtypes.saturating_cast(x, dtype) if in_param_dtypes else x
    return _tree.copy_shared(leaves.unflatten(values), (opt_state, params))
