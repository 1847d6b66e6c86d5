"""A run in two precisions at once, which measures the error of every operation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import at_least_float32
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    bind,
    evaluate,
    inner_jaxprs,
    kind,
    opened,
    scan_counts,
    while_counts,
)
from optax_mp._jax._traced import Traced
from optax_mp.amp._run import Interpreter
from optax_mp.amp._states import Inner, Plan, Step

# Of each step, by its id: the error that it adds, and the error of its result.
Errors = dict[int, tuple[Any, Any]]
NOT_MEASURED = -1.0


class Pair(NamedTuple):
    """A value as written, and the same under amp."""

    full: Any
    low: Any


def shadow_errors(
    interpreter: Interpreter, traced: Traced, plan: Plan
) -> tuple[dict[int, tuple[float, float]], float]:
    """Return the errors of each step of a plan, and that of the outputs.

    The relative error of an array is that of its norm; NaN if not measured.
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
    by_step = {
        step: (_measured(own), _measured(result))
        for step, (own, result) in errors.items()
    }
    return by_step, float(total)


def _measured(error: Any) -> float:
    return float("nan") if error == NOT_MEASURED else float(error)


class _Shadow:
    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def run(
        self, jaxpr: AnyJaxpr, plan: Plan, inputs: Sequence[Pair]
    ) -> tuple[list[Pair], Errors]:
        """Return the outputs of a jaxpr both ways, and the errors inside."""
        errors: Errors = {}
        steps = iter(plan.steps)

        def run_step(equation: Equation, values: list[Any]) -> list[Pair]:
            step, pairs = next(steps), list(map(_paired, values))
            run = self._inside if step.inner else self._alone
            outputs, found = run(equation, step, pairs)
            for key, error in found.items():
                errors[key] = _larger(errors.get(key, error), error)
            return outputs

        outputs = evaluate(jaxpr, self._cast(inputs, plan.inputs, jaxpr), run_step)
        return list(map(_paired, outputs)), errors

    def _cast(self, pairs: Sequence[Pair], states: Any, jaxpr: AnyJaxpr) -> list[Pair]:
        low = [pair.low for pair in pairs]
        low = self._interpreter.cast_all(low, states, opened(jaxpr)[0].invars)
        return [Pair(pair.full, x) for pair, x in zip(pairs, low, strict=True)]

    def _alone(
        self, equation: Equation, step: Step, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        full_inputs = [pair.full for pair in pairs]
        full = bind(equation, full_inputs)
        same = not step.changed and all(pair.full is pair.low for pair in pairs)
        if same or equation.effects:
            # What has effects is run once, as written.
            return [Pair(x, x) for x in full], {id(step): (0.0, 0.0)}
        run = self._interpreter.run_step
        low = run(equation, step, [pair.low for pair in pairs])
        own = run(equation, step, full_inputs)
        own_error = _largest_error(map(Pair, full, own))
        outputs = list(map(Pair, full, low))
        return outputs, {id(step): (own_error, _largest_error(outputs))}

    def _inside(
        self, equation: Equation, step: Step, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        """Run the jaxprs inside an equation both ways."""
        how = kind(equation)
        if how == "shard_map":
            return self._alone(equation, step, pairs)
        inside = {"scan": self._scan, "while": self._while, "cond": self._cond}
        run = inside.get(how or "", self._call)
        outputs, errors = run(equation, step, pairs)
        return outputs, errors | {id(step): (NOT_MEASURED, _largest_error(outputs))}

    def _call(
        self, equation: Equation, step: Step, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        (jaxpr,), (inner,) = inner_jaxprs(equation), step.inner
        return self._returned(jaxpr, inner, pairs)

    def _returned(
        self, jaxpr: AnyJaxpr, inner: Inner, pairs: Sequence[Pair]
    ) -> tuple[list[Pair], Errors]:
        """Return the outputs of a jaxpr inside as it returns them, and the errors."""
        outputs, errors = self.run(jaxpr, inner.plan, pairs)
        low = [pair.low for pair in outputs]
        outvars = opened(jaxpr)[0].outvars
        low = self._interpreter.cast_all(low, inner.returned, outvars)
        return [
            Pair(pair.full, x) for pair, x in zip(outputs, low, strict=True)
        ], errors

    def _scan(
        self, equation: Equation, step: Step, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        start, count = scan_counts(equation)
        stop = start + count
        (jaxpr,), (inner,) = inner_jaxprs(equation), step.inner
        given = self._cast(pairs, inner.given, jaxpr)

        def body(carry: list[Pair], xs: list[Pair]) -> Any:
            inputs = [*given[:start], *carry, *xs]
            outputs, errors = self._returned(jaxpr, inner, inputs)
            return outputs[:count], (outputs[count:], errors)

        params = equation.params
        carry, (ys, errors) = lax.scan(
            body,
            given[start:stop],
            given[stop:],
            length=params["length"],
            reverse=params["reverse"],
        )
        largest = jax.tree.map(functools.partial(jnp.max, initial=NOT_MEASURED), errors)
        return [*carry, *ys], largest

    def _while(
        self, equation: Equation, step: Step, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        of_test, of_body = while_counts(equation)
        start = of_test + of_body
        (test_jaxpr, body_jaxpr), (_, inner) = inner_jaxprs(equation), step.inner
        consts = pairs[of_test:start]
        # Both take the turns that the function takes as written.
        test_consts = [pair.full for pair in pairs[:of_test]]

        def test(state: Any) -> Any:
            full = [pair.full for pair in state[0]]
            return evaluate(test_jaxpr, [*test_consts, *full])[0]

        def run(carry: list[Pair]) -> tuple[list[Pair], Errors]:
            return self._returned(body_jaxpr, inner, [*consts, *carry])

        def body(state: Any) -> Any:
            carry, errors = state
            outputs, found = run(carry)
            return outputs, jax.tree.map(jnp.maximum, errors, found)

        given = self._cast([*consts, *pairs[start:]], inner.given, body_jaxpr)
        carry = given[of_body:]
        shapes = jax.eval_shape(run, carry)[1]
        none = jax.tree.map(lambda x: jnp.full(x.shape, NOT_MEASURED), shapes)
        return lax.while_loop(test, body, (carry, none))

    def _cond(
        self, equation: Equation, step: Step, pairs: list[Pair]
    ) -> tuple[list[Pair], Errors]:
        branches = [
            functools.partial(self._returned, jaxpr, inner)
            for jaxpr, inner in zip(inner_jaxprs(equation), step.inner, strict=True)
        ]
        keys = {key for run in branches for key in jax.eval_shape(run, pairs[1:])[1]}
        none = dict.fromkeys(keys, (jnp.float32(NOT_MEASURED),) * 2)

        def with_all_keys(run: Callable[..., Any]) -> Callable[..., Any]:
            def branch(pairs: list[Pair]) -> Any:
                outputs, errors = run(pairs)
                errors = jax.tree.map(jnp.float32, errors)
                return outputs, none | errors

            return branch

        runs = list(map(with_all_keys, branches))
        return lax.switch(pairs[0].full, runs, pairs[1:])


def _paired(value: Any) -> Pair:
    return value if isinstance(value, Pair) else Pair(value, value)


def _larger(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    return jnp.maximum(a[0], b[0]), jnp.maximum(a[1], b[1])


def _largest_error(pairs: Any) -> Any:
    errors = [_error(pair) for pair in pairs]
    return functools.reduce(jnp.maximum, errors, jnp.float32(0))


def _error(pair: Pair) -> jax.Array:
    """Return the norm of the difference over the norm, of what is finite as written."""
    full, low = map(jnp.asarray, pair)
    if not jnp.issubdtype(full.dtype, jnp.inexact) or not full.size:
        return jnp.float32(0)
    low, full = low.astype(wide := at_least_float32(full.dtype)), full.astype(wide)
    counts = jnp.isfinite(full)
    difference = jnp.where(counts, jnp.abs(low - full), 0)
    difference = jnp.where(jnp.isnan(difference), jnp.inf, difference)
    size = jnp.where(counts, jnp.abs(full), 0)
    # In units of the largest, so that squares stay in range.
    unit = jnp.max(size)
    unit = jnp.where(unit == 0, 1, unit)
    wrong, whole = (jnp.sum(jnp.square(x / unit)) for x in (difference, size))
    none = jnp.where(wrong == 0, 0.0, jnp.inf)
    return jnp.where(whole == 0, none, jnp.sqrt(wrong / whole)).astype(jnp.float32)
