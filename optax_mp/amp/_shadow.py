"""A run in two precisions at once, which measures the error of every operation.

Each value is a pair: as written, and as under amp. Both are computed in one program, so
that loops run as often, and branches go the same way, for both.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_mp._dtypes import at_least_float32
from optax_mp._jax._control_flow import replay, wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, bind, evaluate, open_jaxpr
from optax_mp._jax._traced import TracedCall
from optax_mp.amp._plan import Action, Plan, RegionPlan
from optax_mp.amp._precision import Precisions
from optax_mp.amp._run import Interpreter

# For each action, by its id: the error that it adds to exact inputs, and the error of
# its result.
Errors = dict[int, tuple[Any, Any]]
# Smaller than any error, so that the larger of two is the one that was measured.
NOT_MEASURED = -1.0


class Pair(NamedTuple):
    """A value as written, and the same under amp."""

    full: Any
    low: Any


def shadow_errors(
    interpreter: Interpreter, traced: TracedCall, plan: Plan
) -> tuple[dict[int, tuple[float, float]], float]:
    """Return the errors of each action of a plan, by its id, and that of the outputs.

    They are relative errors by norm; NaN stands for one that was not measured.
    """
    shadow = _Shadow(interpreter)

    def run(arrays: Sequence[Any]) -> tuple[Errors, Any]:
        pairs = [Pair(x, x) for x in arrays]
        outputs, errors = shadow.run(traced.closed, plan, pairs)
        return errors, _largest_error(outputs)

    # On CPU XLA would leave out casts to 16 bits and back, and with them the errors.
    options: Any = {"xla_allow_excess_precision": False}
    compiled = jax.jit(run).lower(traced.arrays).compile(compiler_options=options)
    errors, total = jax.device_get(compiled(traced.arrays))
    by_action = {
        action: (_nan_if_not_measured(own), _nan_if_not_measured(result))
        for action, (own, result) in errors.items()
    }
    return by_action, float(total)


def _nan_if_not_measured(error: Any) -> float:
    return float("nan") if error == NOT_MEASURED else float(error)


class _Shadow:
    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def run(
        self, jaxpr: AnyJaxpr, plan: Plan, inputs: Sequence[Pair]
    ) -> tuple[list[Pair], Errors]:
        """Return the outputs of a jaxpr both ways, and the errors inside."""
        errors: Errors = {}
        actions = iter(plan.actions)

        def run_both(equation: Equation, values: list[Any]) -> list[Pair]:
            action, pairs = next(actions), list(map(_as_pair, values))
            # Inside a shard_map each device would measure its own shards.
            is_measured_inside = action.regions and not wiring_of(equation).is_sharded
            run = self._run_regions if is_measured_inside else self._run_whole
            outputs, found = run(equation, action, pairs)
            # An action may be here already: a jaxpr can be called in several places.
            errors.update(_larger(errors, found))
            return outputs

        invars = open_jaxpr(jaxpr)[0].invars
        outputs = evaluate(jaxpr, self._cast(inputs, plan.inputs, invars), run_both)
        return list(map(_as_pair, outputs)), errors

    def _cast(
        self, pairs: Sequence[Pair], precisions: Precisions, atoms: Sequence[Any]
    ) -> list[Pair]:
        """Return pairs whose second values are in these precisions."""
        low = [pair.low for pair in pairs]
        low = self._interpreter.cast_all(low, precisions, atoms)
        return [Pair(pair.full, x) for pair, x in zip(pairs, low, strict=True)]

    def _run_whole(
        self, equation: Equation, action: Action, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        full_inputs = [pair.full for pair in pairs]
        full = bind(equation, full_inputs)
        same = not action.is_changed and all(pair.full is pair.low for pair in pairs)
        if same or equation.effects:
            # What has effects, such as a callback, must happen once: as written.
            return [Pair(x, x) for x in full], {id(action): (0.0, 0.0)}
        run = self._interpreter.run_equation
        low = run(equation, action, [pair.low for pair in pairs])
        # Once more, from exact inputs: the error that this operation adds.
        from_full = run(equation, action, full_inputs)
        own_error = _largest_error(map(Pair, full, from_full))
        outputs = list(map(Pair, full, low))
        return outputs, {id(action): (own_error, _largest_error(outputs))}

    def _run_regions(
        self, equation: Equation, action: Action, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        runs = [
            functools.partial(self._run_region, region.jaxpr, region_plan)
            for region, region_plan in zip(
                wiring_of(equation).regions, action.regions, strict=True
            )
        ]
        pairs = self._cast(pairs, action.inputs, equation.invars)
        # A loop carries the errors of all actions inside, so all must be there before
        # its first iteration.
        errors: Errors = {
            id(inner): (jnp.float32(NOT_MEASURED), jnp.float32(NOT_MEASURED))
            for region_plan in action.regions
            for inner in _actions(region_plan.plan)
        }
        # The values as written decide on branches and iterations.
        outputs, errors = replay(equation, pairs, runs, errors, lambda pair: pair.full)
        return outputs, errors | {id(action): (NOT_MEASURED, _largest_error(outputs))}

    def _run_region(
        self,
        jaxpr: AnyJaxpr,
        region_plan: RegionPlan,
        pairs: Sequence[Pair],
        errors: Errors,
    ) -> tuple[list[Pair], Errors]:
        """Return the outputs of a region, and the largest errors so far."""
        outputs, found = self.run(jaxpr, region_plan.plan, pairs)
        outvars = open_jaxpr(jaxpr)[0].outvars
        outputs = self._cast(outputs, region_plan.returned, outvars)
        return outputs, errors | _larger(errors, found)


def _actions(plan: Plan) -> Iterator[Action]:
    """Yield the actions of a plan, and those of all regions inside."""
    for action in plan.actions:
        yield action
        for region in action.regions:
            yield from _actions(region.plan)


def _as_pair(value: Any) -> Pair:
    return value if isinstance(value, Pair) else Pair(value, value)


def _larger(errors: Errors, found: Errors) -> Errors:
    """Return for each error in `found` the larger of it and the one in `errors`."""
    old = {key: errors.get(key, error) for key, error in found.items()}
    return jax.tree.map(lambda a, b: jnp.float32(jnp.maximum(a, b)), old, found)


def _largest_error(pairs: Iterable[Pair]) -> Any:
    errors = [_error(pair) for pair in pairs]
    return functools.reduce(jnp.maximum, errors, jnp.float32(0))


def _error(pair: Pair) -> jax.Array:
    """Return the norm of the difference over the norm, where the value is finite."""
    full, low = map(jnp.asarray, pair)
    if not jnp.issubdtype(full.dtype, jnp.inexact) or not full.size:
        return jnp.float32(0)
    low, full = low.astype(wide := at_least_float32(full.dtype)), full.astype(wide)
    # What is infinite or NaN as written, such as the -inf of a mask, has no error.
    is_finite = jnp.isfinite(full)
    difference = jnp.where(is_finite, jnp.abs(low - full), 0)
    # NaN only under amp is an infinite error: NaN would mean "not measured".
    difference = jnp.where(jnp.isnan(difference), jnp.inf, difference)
    size = jnp.where(is_finite, jnp.abs(full), 0)
    # In units of the largest value, so that squares neither overflow nor underflow.
    unit = jnp.max(size)
    unit = jnp.where(unit == 0, 1, unit)
    error, norm = (jnp.sum(jnp.square(x / unit)) for x in (difference, size))
    if_zero = jnp.where(error == 0, 0.0, jnp.inf)
    return jnp.where(norm == 0, if_zero, jnp.sqrt(error / norm)).astype(jnp.float32)
