"""Running a jaxpr by its plan: every equation bound again, with the casts it needs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    aval_like,
    bind,
    bind_with,
    evaluate,
    inner_jaxprs,
    opened,
    retyped,
    shard_mapped,
    traced,
)
from optax_mp.amp._biases import axes_of_inputs
from optax_mp.amp._cast import cast
from optax_mp.amp._custom_rules import custom_jvp, custom_vjp
from optax_mp.amp._functions import bind_by_function
from optax_mp.amp._location import located
from optax_mp.amp._plan import Planner
from optax_mp.amp._remembered import remembered
from optax_mp.amp._rules import Rule, Rules
from optax_mp.amp._states import FULL, LOW, Inner, Plan, States, Step, written


class Interpreter:
    """Runs jaxprs by one set of rules."""

    def __init__(self, rules: Rules) -> None:
        """Run by `rules`."""
        self.rules = rules
        self._planner = Planner(rules)
        self._low = rules.compute_dtype
        # So that an eager call finds jaxprs inside that are compiled already.
        self._converted = remembered(self._convert)

    def plan_call(self, jaxpr: Jaxpr, states: States) -> Plan:
        """Plan a whole function, with inputs in these states."""
        return self._planner.plan_whole(jaxpr, states, axes_of_inputs(jaxpr), None)

    def run(self, jaxpr: AnyJaxpr, plan: Plan, args: Sequence[Any]) -> list[Any]:
        """Return the outputs of a jaxpr, in the states that the plan says."""
        steps = iter(plan.steps)

        def run_next(equation: Equation, inputs: list[Any]) -> Sequence[Any]:
            return self.run_step(equation, next(steps), inputs)

        return evaluate(jaxpr, args, run_next)

    def run_step(
        self, equation: Equation, step: Step, inputs: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the outputs of one equation as its step says."""
        with located(equation):
            cast = self.cast_all(inputs, step.inputs, equation.invars)
            return self._run_cast(equation, step, cast)

    def _run_cast(
        self, equation: Equation, step: Step, inputs: list[Any]
    ) -> Sequence[Any]:
        match step.how:
            case "same":
                return inputs
            case "bind":
                outputs = bind(equation, inputs, step.params)
                return self.cast_all(outputs, step.outputs, equation.outvars)
            case "function":
                return bind_by_function(step.rule, self._low, equation, inputs)
        jaxprs = inner_jaxprs(equation)
        if step.how in ("jit", "remat", "scan", "while", "cond"):
            pairs = zip(jaxprs, step.inner, strict=True)
            return bind_with(equation, inputs, [self._converted(*x) for x in pairs])

        def call(*args: Any) -> list[Any]:
            return self.run(jaxprs[0], step.inner[0].plan, args)

        if step.how in ("custom_jvp", "custom_vjp"):
            rule = custom_jvp if step.how == "custom_jvp" else custom_vjp
            returned = self._dtypes(step.outputs, equation.outvars)
            call = rule(equation, call, returned, self._interpreter(step.scope))
        elif step.how == "shard_map":
            call = shard_mapped(equation, call)
        return call(*inputs)

    def _convert(self, jaxpr: AnyJaxpr, inner: Inner) -> ClosedJaxpr:
        """Return a jaxpr inside an equation as its plan says."""
        opened_jaxpr, _ = opened(jaxpr)

        def run(*args: Any) -> list[Any]:
            cast = self.cast_all(args, inner.plan.inputs, opened_jaxpr.invars)
            outputs = self.run(jaxpr, inner.plan, cast)
            return self.cast_all(outputs, inner.returned, opened_jaxpr.outvars)

        avals = [
            retyped(atom.aval, self._low) if state == LOW else atom.aval
            for atom, state in zip(opened_jaxpr.invars, inner.given, strict=True)
        ]
        return traced(run, avals)

    def _interpreter(self, scope: Rule | None) -> Callable[..., Any]:
        """Return the interpreter of functions as they are written in a scope.

        It runs `function(*given)`, where each array in `given` is low or of the dtype
        in `dtypes` for which the function is written.
        """

        def interpret(function: Callable[..., Any], given: Any, dtypes: Any) -> Any:
            avals = jax.tree.map(aval_like, given, dtypes)
            closed, returned = jax.make_jaxpr(function, return_shape=True)(*avals)
            leaves = jax.tree.leaves(given)
            states = tuple(
                state and (LOW if x.dtype == self._low else FULL)
                for state, x in zip(written(closed.jaxpr.invars), leaves, strict=True)
            )
            no_biases = (None,) * len(states)
            plan = self._planner.plan_whole(closed.jaxpr, states, no_biases, scope)
            values = self.run(closed, plan, leaves)
            return jax.tree.structure(returned).unflatten(values)

        return interpret

    def cast_all(
        self, values: Sequence[Any], states: States, atoms: Sequence[Any]
    ) -> list[Any]:
        """Return values in these states; what is weak or takes no part stays."""
        return list(map(cast, values, self._dtypes(states, atoms)))

    def _dtypes(self, states: States, atoms: Sequence[Any]) -> list[Any]:
        """Return the dtypes that states stand for, None for what is to stay."""
        return [
            self._low if state == LOW else atom.aval.dtype if state == FULL else None
            for state, atom in zip(states, atoms, strict=True)
        ]
