"""Which precision each value of a jaxpr has: a dataflow, found without tracing."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_mp._jax._jaxpr import (
    Equation,
    Jaxpr,
    inner_jaxprs,
    is_literal,
    kind,
    opened,
    scan_counts,
    while_counts,
)
from optax_mp.amp._biases import Axes, Biases
from optax_mp.amp._demand import Demand, Wants, sinks
from optax_mp.amp._functions import states_by_function
from optax_mp.amp._location import located
from optax_mp.amp._remembered import remembered
from optax_mp.amp._rules import Rule, Rules
from optax_mp.amp._states import (
    FULL,
    LOW,
    REPEATS,
    Inner,
    Plan,
    State,
    States,
    Step,
    Weak,
    cast_to,
    literal_state,
    settled,
    widest,
    written,
)


@dataclass(frozen=True)
class _Around:
    """What is known of an equation from around it.

    Attributes:
        states: the states of its inputs.
        axes: what is known of them as biases.
        wants: what is wanted of its outputs.
        scope: the rule of its scopes.
    """

    states: States
    axes: Axes
    wants: Wants
    scope: Rule | None


# The states of inputs and outputs, how the jaxprs inside are run, and what decided.
_Inside = tuple[States, States, tuple[Inner, ...], str]


class Planner:
    """Plans jaxprs by one set of rules; a jaxpr inside others, once."""

    def __init__(self, rules: Rules) -> None:
        """Plan by `rules`."""
        self.rules = rules
        self._demand = Demand(rules)
        info = jnp.finfo(rules.compute_dtype)
        self._smallest, self._largest = float(info.tiny), float(info.max)
        self._plan_inside = remembered(self._plan)

    def plan_whole(
        self, jaxpr: Jaxpr, inputs: States, axes: Axes, scope: Rule | None
    ) -> Plan:
        """Plan a jaxpr whose readers are not known.

        Args:
            jaxpr: the jaxpr.
            inputs: the states of its inputs.
            axes: what is known of them as biases.
            scope: the rule of the scopes around.
        """
        return self._plan(jaxpr, inputs, axes, (None,) * len(jaxpr.outvars), scope)

    def _plan(
        self,
        jaxpr: Jaxpr,
        inputs: States,
        axes: Axes,
        wants: Wants,
        scope: Rule | None,
    ) -> Plan:
        known = dict(zip(jaxpr.constvars, written(jaxpr.constvars), strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def state(atom: Any) -> State:
            return literal_state(atom) if is_literal(atom) else known[atom]

        wanted = self._demand.within(jaxpr, wants, scope)
        biases = Biases(jaxpr, axes)
        steps, changed = [], LOW in inputs
        for equation in jaxpr.eqns:
            around = _Around(
                tuple(map(state, equation.invars)),
                biases.of(equation),
                tuple(map(wanted.get, equation.outvars)),
                self.rules.in_scope(equation, scope),
            )
            step = self._step(equation, around, biases.added_by(equation))
            steps.append(step)
            known.update(zip(equation.outvars, step.outputs, strict=True))
            biases.follow(equation)
            changed |= step.changed
        return Plan(inputs, tuple(steps), tuple(map(state, jaxpr.outvars)), changed)

    def _step(self, equation: Equation, around: _Around, adds_bias: bool) -> Step:
        states, scope = around.states, around.scope
        if scope != "as_written":
            if kind(equation):
                return self._by_jaxprs_inside(equation, around)
            if equation.primitive.name == "convert_element_type":
                return self._cast(equation, states, scope)
        rule, why = self.rules.of(equation, scope, adds_bias)
        if callable(rule):
            low = self.rules.compute_dtype
            with located(equation):
                outputs = states_by_function(rule, low, equation, states)
            return Step("function", states, outputs, rule, why, scope)
        if rule == "own":
            kept = settled(states)
            return Step("bind", kept, kept, rule, why, scope)
        if rule == "widest" and equation.primitive.name in REPEATS:
            if isinstance(states[0], Weak):
                return Step("bind", (FULL,), states, rule, "literal", scope)
        target = result = FULL
        if rule in ("low", "widest", "rounded"):
            target, why = self._target(equation, rule, around, why)
            is_rounded = rule == "rounded" and LOW in states and why == "inputs"
            result = LOW if is_rounded else target
        inputs = cast_to(target, states)
        outputs = cast_to(result, written(equation.outvars))
        params = self._low_params(equation) if target == LOW else None
        return Step("bind", inputs, outputs, rule, why, scope, params)

    def _target(
        self, equation: Equation, rule: Rule, around: _Around, why: str
    ) -> tuple[str, str]:
        """Return the state in which an operation is done, and why."""
        if not self._fit(around.states):
            return FULL, "literal"
        if rule != "low" and sinks(equation, around.wants):
            return FULL, "sink"
        if rule != "low" and widest(around.states) == FULL:
            return FULL, "inputs"
        return LOW, why

    def _fit(self, states: States) -> bool:
        """Return whether the compute dtype can hold the literals, if roughly."""
        values = [state.value for state in states if isinstance(state, Weak)]
        sizes = [abs(x) for x in values if x and np.isfinite(x)]
        return all(self._smallest <= size <= self._largest for size in sizes)

    def _low_params(self, equation: Equation) -> dict[str, Any] | None:
        # A float32 result of 16-bit inputs would make both products of the backward
        # pass ones of mixed dtypes; hardware accumulates in float32 anyway.
        if equation.params.get("preferred_element_type") is None:
            return None
        low = self.rules.compute_dtype
        return equation.params | {"preferred_element_type": low}

    def _cast(self, equation: Equation, states: States, scope: Rule | None) -> Step:
        """Plan a change of dtype: the user's, and honoured."""
        old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        outputs = written(equation.outvars)
        if old == new and states[0] is not None:
            # It makes a weak type strong, or the other way round.
            return Step("same", states, states, "own", "cast", scope)
        if states[0] == LOW and new == self.rules.compute_dtype:
            return Step("same", states, outputs, "own", "cast", scope)
        if old == np.bool_ and outputs[0]:
            outputs = (Weak(),)  # 0 and 1 are exact in any dtype
        return Step("bind", settled(states), outputs, "as_written", "cast", scope)

    def _by_jaxprs_inside(self, equation: Equation, around: _Around) -> Step:
        how = kind(equation) or ""
        plan = {"scan": self._scan, "while": self._while, "cond": self._cond}
        inputs, outputs, inner, why = plan.get(how, self._call)(equation, around)
        if not any(each.plan.changed for each in inner):
            how, inputs, outputs = "bind", cast_to(FULL, inputs), settled(outputs)
        return Step(how, inputs, outputs, "inside", why, around.scope, inner=inner)

    def _call(self, equation: Equation, around: _Around) -> _Inside:
        jaxpr, _ = opened(inner_jaxprs(equation)[0])
        states, axes = around.states, around.axes
        plan = self._plan_inside(jaxpr, states, axes, around.wants, around.scope)
        return states, plan.outputs, (Inner(plan, states, plan.outputs),), "inside"

    def _scan(self, equation: Equation, around: _Around) -> _Inside:
        jaxpr, _ = opened(inner_jaxprs(equation)[0])
        start, count = scan_counts(equation)
        stop = start + count
        consts, begun, xs = _split(around.states, start, stop)
        of_consts, _, of_xs = _split(around.axes, start, stop)
        axes = (*of_consts, *(None,) * count, *of_xs)
        wants = self._demand.of_body(equation, around.wants, around.scope)
        carry = settled(begun)
        while True:
            ins = (*consts, *carry, *xs)
            plan = self._plan_inside(jaxpr, ins, axes, wants, around.scope)
            if (joined := _joined(carry, plan.outputs[:count])) == carry:
                break
            carry = joined
        # A low constant goes in as written and is cast inside, so that what the turns
        # make of its gradient is added up in float32.
        consts = tuple(FULL if state == LOW else state for state in consts)
        given = (*consts, *carry, *xs)
        outputs = (*carry, *settled(plan.outputs[count:]))
        why = _why_of_loop(begun, carry, plan.outputs)
        return given, outputs, (Inner(plan, given, outputs),), why

    def _while(self, equation: Equation, around: _Around) -> _Inside:
        (test, _), (body, _) = map(opened, inner_jaxprs(equation))
        of_test, of_body = while_counts(equation)
        start = of_test + of_body
        test_consts, consts, begun = _split(around.states, of_test, start)
        test_axes, body_axes, _ = _split(around.axes, of_test, start)
        of_carry = (None,) * len(begun)
        wants = self._demand.of_body(equation, around.wants, around.scope)
        carry = settled(begun)
        while True:
            ins, axes = (*consts, *carry), (*body_axes, *of_carry)
            plan = self._plan_inside(body, ins, axes, wants, around.scope)
            if (joined := _joined(carry, plan.outputs)) == carry:
                break
            carry = joined
        test_ins, axes = (*test_consts, *carry), (*test_axes, *of_carry)
        test_plan = self._plan_inside(test, test_ins, axes, (None,), around.scope)
        of_test_run = Inner(test_plan, test_ins, test_plan.outputs)
        inner = (of_test_run, Inner(plan, ins, carry))
        why = _why_of_loop(begun, carry, plan.outputs)
        return (*test_consts, *consts, *carry), carry, inner, why

    def _cond(self, equation: Equation, around: _Around) -> _Inside:
        states, axes = around.states[1:], around.axes[1:]
        plans = [
            self._plan_inside(
                opened(branch)[0], states, axes, around.wants, around.scope
            )
            for branch in inner_jaxprs(equation)
        ]
        outputs = tuple(
            each[0] and (widest(each) if self._fit(each) else FULL)
            for each in zip(*(plan.outputs for plan in plans), strict=True)
        )
        inner = tuple(Inner(plan, states, outputs) for plan in plans)
        return around.states, outputs, inner, "inside"


def _split(values: tuple, start: int, stop: int) -> tuple[tuple, tuple, tuple]:
    return values[:start], values[start:stop], values[stop:]


def _joined(carry: States, returned: States) -> States:
    """Return the states of a carry that is low where it begins and comes back so."""
    pairs = zip(carry, returned, strict=True)
    return tuple(a and (LOW if (a, b) == (LOW, LOW) else FULL) for a, b in pairs)


def _why_of_loop(begun: States, carry: States, returned: States) -> str:
    """Return whether a carry is full only because one of its two ends is."""
    ends = zip(carry, begun, returned[: len(carry)], strict=True)
    widened = any(state == FULL and LOW in (a, b) for state, a, b in ends)
    return "fix-point" if widened else "inside"
