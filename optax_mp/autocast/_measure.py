"""The errors that amp adds: those of single operations, and that of a whole function.

The function runs as written. Beside each operation that amp changes, the same runs as
planned on the same inputs: the difference is the error that this operation adds.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._dtypes import at_least_float32
from optax_mp._jax._control_flow import replay, wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, bind, evaluate
from optax_mp._jax._traced import TracedCall
from optax_mp.autocast._plan import Action, Plan
from optax_mp.autocast._run import Interpreter

# For each action, by its id, the error that it adds to exact inputs.
Errors = dict[int, Any]
# Smaller than any error, so that the larger of two is the one that was measured.
_NOT_MEASURED = -1.0


def measure_errors(
    interpreter: Interpreter, traced: TracedCall, plan: Plan
) -> tuple[dict[int, float], float]:
    """Return the error of each action of a plan, by its id, and that of the outputs.

    They are relative errors by norm; NaN stands for one that was not measured. A
    function with side effects runs once, as written, so that of its outputs is not.
    """
    has_effects = bool(traced.closed.effects)
    outvars = traced.closed.jaxpr.outvars

    def run(arrays: Sequence[Any]) -> tuple[Errors, Any]:
        full, errors = _run(interpreter, traced.closed, plan, arrays)
        if has_effects:
            return errors, jnp.float32(_NOT_MEASURED)
        low = interpreter.run(traced.closed, plan, arrays)
        return errors, _largest_error(full, low)

    # On CPU XLA would leave out casts to 16 bits and back, and with them the errors.
    options: Any = {"xla_allow_excess_precision": False}
    compiled = jax.jit(run).lower(traced.arrays).compile(compiler_options=options)
    errors, total = jax.device_get(compiled(traced.arrays))
    by_action = {action: _as_float(error) for action, error in errors.items()}
    return by_action, _as_float(total) if outvars else 0.0


def _as_float(error: Any) -> float:
    return float("nan") if error == _NOT_MEASURED else float(error)


def _run(
    interpreter: Interpreter, jaxpr: AnyJaxpr, plan: Plan, inputs: Sequence[Any]
) -> tuple[list[Any], Errors]:
    """Return the outputs of a jaxpr as written, and the errors of its actions."""
    errors: Errors = {}
    actions = iter(plan.actions)

    def run_next(equation: Equation, inputs: list[Any]) -> list[Any]:
        action = next(actions)
        # Inside a shard_map each device would measure its own shards.
        is_measured_inside = action.regions and not wiring_of(equation).is_sharded
        run = _run_regions if is_measured_inside else _run_whole
        outputs, new = run(interpreter, equation, action, inputs)
        # An action may be here already: a jaxpr can be called in several places.
        errors.update(_larger(errors, new))
        return outputs

    return evaluate(jaxpr, inputs, run_next), errors


def _run_whole(
    interpreter: Interpreter, equation: Equation, action: Action, inputs: list[Any]
) -> tuple[list[Any], Errors]:
    full = bind(equation, inputs)
    # What has effects, such as a callback, must happen once: as written.
    if equation.effects or not action.is_changed:
        return full, {id(action): jnp.float32(0)}
    low = interpreter.run_equation(equation, action, inputs)
    return full, {id(action): _largest_error(full, low)}


def _run_regions(
    interpreter: Interpreter, equation: Equation, action: Action, inputs: list[Any]
) -> tuple[list[Any], Errors]:
    # A loop carries the errors of all actions inside, so all must be there before its
    # first iteration.
    none: Errors = {
        id(inner): jnp.float32(_NOT_MEASURED)
        for region_plan in action.regions
        for inner in region_plan.plan.all_actions()
    }

    def runner(jaxpr: AnyJaxpr, plan: Plan) -> Any:
        def run(inputs: list[Any], errors: Errors) -> tuple[list[Any], Errors]:
            outputs, new = _run(interpreter, jaxpr, plan, inputs)
            return outputs, errors | _larger(errors, new)

        return run

    regions = zip(wiring_of(equation).regions, action.regions, strict=True)
    runs = [runner(region.jaxpr, region_plan.plan) for region, region_plan in regions]
    return replay(equation, inputs, runs, none)


def _larger(errors: Errors, new: Errors) -> Errors:
    """Return for each error in `new` the larger of it and the one in `errors`."""
    return {
        action: jnp.maximum(errors.get(action, error), error)
        for action, error in new.items()
    }


def _largest_error(full: Sequence[Any], low: Sequence[Any]) -> Any:
    return functools.reduce(jnp.maximum, map(_error, full, low), jnp.float32(0))


def _error(full: Any, low: Any) -> jax.Array:
    """Return the norm of the difference over the norm, where the value is finite."""
    full, low = jnp.asarray(full), jnp.asarray(low)
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
