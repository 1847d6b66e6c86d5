"""Which precision each value of a jaxpr has: a dataflow, found without tracing."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_mp._jaxpr import (
    Equation,
    Jaxpr,
    inner_jaxprs,
    is_literal,
    kind,
    opened,
    scan_counts,
    while_counts,
)
from optax_mp.amp._demand import Demand, Wants, sinks
from optax_mp.amp._functions import states_by_function
from optax_mp.amp._location import located
from optax_mp.amp._rules import Rule, Rules
from optax_mp.amp._states import (
    FULL,
    LOW,
    Inner,
    Plan,
    State,
    States,
    Step,
    Weak,
    cast_to,
    literal_state,
    settled,
    takes_part,
    widest,
    written,
)

# What returns the values that it is given, perhaps several times.
_REPEATS = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p pvary "
    "pbroadcast pcast stop_gradient convert_element_type".split()
)


class Planner:
    """Plans jaxprs by one set of rules; what it has planned it remembers."""

    def __init__(self, rules: Rules) -> None:
        """Plan by `rules`."""
        self.rules = rules
        self._demand = Demand(rules)
        info = jnp.finfo(rules.compute_dtype)
        self._smallest, self._largest = float(info.tiny), float(info.max)
        # Bounded, for eager calls bring new jaxprs each time.
        self.plan = functools.lru_cache(maxsize=1024)(self._plan)

    def _plan(
        self, jaxpr: Jaxpr, inputs: States, wants: Wants, scope: Rule | None
    ) -> Plan:
        """Plan a jaxpr for inputs in these states and readers with these wants.

        `scope` is the rule of the scopes around.
        """
        known = dict(zip(jaxpr.constvars, written(jaxpr.constvars), strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def state(atom: Any) -> State:
            return literal_state(atom) if is_literal(atom) else known[atom]

        wanted = self._demand.within(jaxpr, wants, scope)
        biases = _Biases(jaxpr)
        steps, changed = [], LOW in inputs
        for equation in jaxpr.eqns:
            states = tuple(map(state, equation.invars))
            outs = tuple(map(wanted.get, equation.outvars))
            step = self._step(equation, states, outs, scope, biases.added_by(equation))
            steps.append(step)
            known.update(zip(equation.outvars, step.outputs, strict=True))
            changed |= step.changed
        return Plan(inputs, tuple(steps), tuple(map(state, jaxpr.outvars)), changed)

    def _step(
        self,
        equation: Equation,
        states: States,
        wants: Wants,
        scope: Rule | None,
        adds_bias: bool,
    ) -> Step:
        scope = self.rules.in_scope(equation, scope)
        if scope != "as_written":
            if kind(equation):
                return self._around(equation, states, wants, scope)
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
        if rule == "widest" and equation.primitive.name in _REPEATS:
            if isinstance(states[0], Weak):
                return Step("bind", (FULL,), states, rule, "literal", scope)
        target = result = FULL
        if rule in ("low", "widest", "rounded"):
            target, why = self._target(equation, rule, states, wants, why)
            is_rounded = rule == "rounded" and LOW in states and why == "inputs"
            result = LOW if is_rounded else target
        inputs = cast_to(target, states)
        outputs = cast_to(result, written(equation.outvars))
        params = self._low_params(equation) if target == LOW else None
        return Step("bind", inputs, outputs, rule, why, scope, params)

    def _target(
        self,
        equation: Equation,
        rule: Rule,
        states: States,
        wants: Wants,
        why: str,
    ) -> tuple[str, str]:
        """Return the state in which an operation is done, and why."""
        if not self._fit(states):
            return FULL, "literal"
        if rule != "low" and sinks(equation, wants):
            return FULL, "sink"
        if rule != "low" and widest(states) == FULL:
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

    def _around(
        self, equation: Equation, states: States, wants: Wants, scope: Rule | None
    ) -> Step:
        """Plan an equation by the jaxprs inside it."""
        how = kind(equation) or ""
        plan = {"scan": self._scan, "while": self._while, "cond": self._cond}
        inputs, outputs, inner, why = plan.get(how, self._call)(
            equation, states, wants, scope
        )
        if not any(each.plan.changed for each in inner):
            how, inputs, outputs = "bind", cast_to(FULL, states), settled(outputs)
        return Step(how, inputs, outputs, "inside", why, scope, inner=inner)

    def _call(self, equation, states, wants, scope):
        jaxpr, _ = opened(inner_jaxprs(equation)[0])
        plan = self.plan(jaxpr, states, wants, scope)
        return states, plan.outputs, (Inner(plan, states, plan.outputs),), "inside"

    def _scan(self, equation, states, wants, scope):
        jaxpr, _ = opened(inner_jaxprs(equation)[0])
        wants = self._demand.of_body(equation, wants, scope)
        start, count = scan_counts(equation)
        stop = start + count
        carry = settled(states[start:stop])
        while True:
            ins = (*states[:start], *carry, *states[stop:])
            plan = self.plan(jaxpr, ins, wants, scope)
            if (joined := _joined(carry, plan.outputs[:count])) == carry:
                break
            carry = joined
        # A low constant goes in as written and is cast inside, so that what the turns
        # make of its gradient is added up in float32.
        consts = tuple(x and FULL if x == LOW else x for x in states[:start])
        given = (*consts, *carry, *states[stop:])
        outputs = (*carry, *settled(plan.outputs[count:]))
        why = _why_of_loop(states[start:stop], carry, plan.outputs)
        return given, outputs, (Inner(plan, given, outputs),), why

    def _while(self, equation, states, wants, scope):
        (test, _), (body, _) = map(opened, inner_jaxprs(equation))
        wants = self._demand.of_body(equation, wants, scope)
        of_test, of_body = while_counts(equation)
        start = of_test + of_body
        carry = settled(states[start:])
        while True:
            ins = (*states[of_test:start], *carry)
            plan = self.plan(body, ins, wants, scope)
            if (joined := _joined(carry, plan.outputs)) == carry:
                break
            carry = joined
        of_test_ins = (*states[:of_test], *carry)
        test_plan = self.plan(test, of_test_ins, (None,), scope)
        inner = (
            Inner(test_plan, of_test_ins, test_plan.outputs),
            Inner(plan, ins, carry),
        )
        why = _why_of_loop(states[start:], carry, plan.outputs)
        return (*states[:start], *carry), carry, inner, why

    def _cond(self, equation, states, wants, scope):
        jaxprs = [opened(jaxpr)[0] for jaxpr in inner_jaxprs(equation)]
        plans = [self.plan(jaxpr, states[1:], wants, scope) for jaxpr in jaxprs]
        outputs = tuple(
            each[0] and (widest(each) if self._fit(each) else FULL)
            for each in zip(*(plan.outputs for plan in plans), strict=True)
        )
        inner = tuple(Inner(plan, states[1:], outputs) for plan in plans)
        return states, outputs, inner, "inside"


class _Biases:
    """The inputs of a jaxpr that may be the bias of a layer: those with one axis."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        inputs: Any = filter(takes_part, (*jaxpr.constvars, *jaxpr.invars))
        # With what repeats them, and how many numbers they have.
        self._sizes = {
            var: var.aval.size
            for var in inputs
            if var.aval.ndim and var.aval.size == max(var.aval.shape)
        }

    def added_by(self, equation: Equation) -> bool:
        """Return whether an equation adds a bias to something larger.

        To be asked of each equation in turn.
        """
        name = equation.primitive.name
        inputs = [atom for atom in equation.invars if not is_literal(atom)]
        sizes = [self._sizes[var] for var in inputs if var in self._sizes]
        if name in _REPEATS and sizes:
            self._sizes[equation.outvars[0]] = sizes[0]
        # One that is as large as the sum is no bias: it may be what is summed up.
        return name == "add" and any(x < equation.outvars[0].aval.size for x in sizes)


def _joined(carry: States, returned: States) -> States:
    """Return the states of a carry that is low where it begins and comes back so."""
    pairs = zip(carry, returned, strict=True)
    return tuple(a and (LOW if (a, b) == (LOW, LOW) else FULL) for a, b in pairs)


def _why_of_loop(begun: States, carry: States, returned: States) -> str:
    """Return whether a carry is full only because one of its two ends is."""
    ends = zip(carry, begun, returned[: len(carry)], strict=True)
    widened = any(state == FULL and LOW in (a, b) for state, a, b in ends)
    return "fix-point" if widened else "inside"
