"""Which precision each value of a jaxpr has: a dataflow analysis, without tracing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_mp._jax._control_flow import has_regions, wiring_of
from optax_mp._jax._jaxpr import (
    Equation,
    Jaxpr,
    cache_by_jaxpr,
    is_literal,
    open_jaxpr,
)
from optax_mp._jax._wiring import Region, Wiring
from optax_mp.amp._biases import Axes, Biases
from optax_mp.amp._demand import Demand, Wants, is_better_full
from optax_mp.amp._function_rules import precisions_by_function
from optax_mp.amp._places import name_in_errors
from optax_mp.amp._precision import (
    FULL,
    LOW,
    REPEATS,
    Precision,
    Precisions,
    Weak,
    full_precisions,
    literal_precision,
    set_all,
    widest,
    without_weak,
)
from optax_mp.amp._rules import Rule, Rules


@dataclass(frozen=True)
class RegionPlan:
    """How a region of an equation runs. Equal ones share one converted jaxpr.

    Attributes:
        plan: what becomes of its equations.
        given: the precisions in which its inputs come; they are cast inside to those
            that the plan begins with.
        returned: the precisions to which its outputs are cast.
    """

    plan: "Plan"
    given: Precisions
    returned: Precisions


@dataclass(frozen=True, eq=False)
class Action:
    """What becomes of one equation.

    Attributes:
        how: "bind", its inputs are cast and it is bound; "same", it returns its input;
            "function", a user's function binds it; "regions", its regions change.
        inputs: the precision to which each input is cast.
        outputs: the precisions of its outputs.
        rule: the rule that it follows.
        why: what decided.
        scope_rule: the rule of the scope that it stands in.
        params: its parameters, where they change.
        regions: how its regions run.
    """

    how: str
    inputs: Precisions
    outputs: Precisions
    rule: Any
    why: str
    scope_rule: Any = None
    params: dict[str, Any] | None = None
    regions: tuple[RegionPlan, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Return whether anything is other than as written."""
        changed_inside = any(region.plan.is_changed for region in self.regions)
        changed_here = LOW in self.inputs or LOW in self.outputs
        return self.how == "function" or changed_here or changed_inside


@dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of one jaxpr.

    Attributes:
        inputs: the precisions of its inputs.
        actions: an action for each equation.
        outputs: the precisions of its outputs.
        is_changed: whether anything is other than as written.
    """

    inputs: Precisions
    actions: tuple[Action, ...]
    outputs: Precisions
    is_changed: bool


@dataclass(frozen=True)
class _Context:
    """What is known of an equation from the equations around it.

    Attributes:
        precisions: those of its inputs.
        axes: what is known of its inputs as biases.
        wants: what is wanted of its outputs.
        scope_rule: the rule of the scope that it stands in.
    """

    precisions: Precisions
    axes: Axes
    wants: Wants
    scope_rule: Rule | None


class Planner:
    """Plans jaxprs by one set of rules, each region once."""

    def __init__(self, rules: Rules) -> None:
        """Plan by `rules`."""
        self.rules = rules
        self._demand = Demand(rules)
        info = jnp.finfo(rules.compute_dtype)
        self._smallest, self._largest = float(info.tiny), float(info.max)
        # A loop in a loop is planned anew in every turn of the outer search.
        self._plan_cached = cache_by_jaxpr(self._plan)

    def plan_whole(
        self, jaxpr: Jaxpr, inputs: Precisions, axes: Axes, scope_rule: Rule | None
    ) -> Plan:
        """Plan a jaxpr whose readers are not known.

        Args:
            jaxpr: the jaxpr.
            inputs: the precisions of its inputs.
            axes: what is known of its inputs as biases.
            scope_rule: the rule of the scopes around.
        """
        wants = (None,) * len(jaxpr.outvars)
        return self._plan(jaxpr, inputs, axes, wants, scope_rule)

    def _plan(
        self,
        jaxpr: Jaxpr,
        inputs: Precisions,
        axes: Axes,
        wants: Wants,
        scope_rule: Rule | None,
    ) -> Plan:
        known = dict(
            zip(jaxpr.constvars, full_precisions(jaxpr.constvars), strict=True)
        )
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def precision(atom: Any) -> Precision:
            return literal_precision(atom) if is_literal(atom) else known[atom]

        wanted = self._demand.within(jaxpr, wants, scope_rule)
        biases = Biases(jaxpr, axes)
        actions: list[Action] = []
        for equation in jaxpr.eqns:
            context = _Context(
                tuple(map(precision, equation.invars)),
                biases.of(equation),
                tuple(map(wanted.get, equation.outvars)),
                self.rules.in_scope(equation, scope_rule),
            )
            action = self._action(equation, context, biases.added_by(equation))
            actions.append(action)
            known.update(zip(equation.outvars, action.outputs, strict=True))
            biases.follow(equation)
        is_changed = LOW in inputs or any(action.is_changed for action in actions)
        outputs = tuple(map(precision, jaxpr.outvars))
        return Plan(inputs, tuple(actions), outputs, is_changed)

    def _action(self, equation: Equation, context: _Context, adds_bias: bool) -> Action:
        precisions, scope_rule = context.precisions, context.scope_rule
        # An equation that a scope leaves alone is bound whole, with its regions.
        if scope_rule != "as_written":
            if has_regions(equation):
                return self._plan_regions(equation, context)
            if equation.primitive.name == "convert_element_type":
                return self._plan_cast(equation, precisions, scope_rule)
        rule, why = self.rules.of(equation, scope_rule, adds_bias)
        if callable(rule):
            low = self.rules.compute_dtype
            with name_in_errors(equation):
                outputs = precisions_by_function(rule, low, equation, precisions)
            return Action("function", precisions, outputs, rule, why, scope_rule)
        if rule == "own":
            own = without_weak(precisions)
            return Action("bind", own, own, rule, why, scope_rule)
        if rule == "widest" and equation.primitive.name in REPEATS:
            # A repeated literal stays weak, so that what it is combined with decides.
            if isinstance(precisions[0], Weak):
                return Action("bind", (FULL,), precisions, rule, "literal", scope_rule)
        target = result = FULL
        if rule in ("low", "widest", "rounded"):
            target, why = self._target(equation, rule, context, why)
            # The sum with a float32 bias is float32 only until it is rounded.
            is_rounded = rule == "rounded" and LOW in precisions and why == "inputs"
            result = LOW if is_rounded else target
        inputs = set_all(target, precisions)
        outputs = set_all(result, full_precisions(equation.outvars))
        params = self._low_params(equation) if target == LOW else None
        return Action("bind", inputs, outputs, rule, why, scope_rule, params)

    def _target(
        self, equation: Equation, rule: Rule, context: _Context, why: str
    ) -> tuple[str, str]:
        """Return the precision in which an operation is done, and why."""
        if not self._fit(context.precisions):
            return FULL, "literal"
        # A product is low even then: that is where the time goes.
        if rule != "low" and is_better_full(equation, context.wants):
            return FULL, "sink"
        if rule != "low" and widest(context.precisions) == FULL:
            return FULL, "inputs"
        return LOW, why

    def _fit(self, precisions: Sequence[Precision]) -> bool:
        """Return whether the range of the compute dtype holds all literals."""
        values = [x.value for x in precisions if isinstance(x, Weak)]
        # 0 and infinity fit any dtype; less than `tiny` may be flushed to 0.
        sizes = [abs(x) for x in values if x and np.isfinite(x)]
        return all(self._smallest <= size <= self._largest for size in sizes)

    def _low_params(self, equation: Equation) -> dict[str, Any] | None:
        # A float32 result of 16-bit inputs would make both products of the backward
        # pass ones of mixed dtypes; hardware accumulates in float32 anyway.
        if equation.params.get("preferred_element_type") is None:
            return None
        low = self.rules.compute_dtype
        return equation.params | {"preferred_element_type": low}

    def _plan_cast(
        self, equation: Equation, precisions: Precisions, scope_rule: Rule | None
    ) -> Action:
        """Plan a change of dtype: it is the user's, and honoured."""
        old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        outputs = full_precisions(equation.outvars)
        if old == new and precisions[0] is not None:
            # It only makes a weak type strong, or a strong one weak.
            return Action("same", precisions, precisions, "own", "cast", scope_rule)
        if precisions[0] == LOW and new == self.rules.compute_dtype:
            return Action("same", precisions, outputs, "own", "cast", scope_rule)
        if old == np.bool_ and outputs[0]:
            outputs = (Weak(),)  # 0 and 1 are exact in any dtype
        inputs = without_weak(precisions)
        return Action("bind", inputs, outputs, "as_written", "cast", scope_rule)

    def _plan_regions(self, equation: Equation, context: _Context) -> Action:
        wiring, scope_rule = wiring_of(equation), context.scope_rule
        carried = {i for _, i in wiring.carry}
        # A turn returns computed values: as carry they are neither literals nor biases.
        begun = [
            FULL if i in carried and isinstance(x, Weak) else x
            for i, x in enumerate(context.precisions)
        ]
        axes = [None if i in carried else x for i, x in enumerate(context.axes)]
        _, wants = self._demand.through(equation, context.wants, scope_rule)

        def plan(region: Region, inputs: Precisions) -> Plan:
            wanted = tuple(None if i is None else wants[i] for i in region.outputs)
            jaxpr, _ = open_jaxpr(region.jaxpr)
            own_axes = region.read(axes)
            return self._plan_cached(jaxpr, inputs, own_axes, wanted, scope_rule)

        def outputs_of(region: Region, inputs: Precisions) -> Precisions:
            outputs = plan(region, inputs).outputs
            return without_weak(outputs) if wiring.repeats else outputs

        # The plans of the last turn of the search come from the cache.
        flow = wiring.forward(begun, outputs_of, self._join)
        plans = [plan(region, region.read(flow.inputs)) for region in wiring.regions]
        # A low constant of a loop goes in as written and is cast in every turn, so that
        # the turns' shares of its gradient are summed in float32.
        given = tuple(
            FULL if i in wiring.summed and x == LOW else x
            for i, x in enumerate(flow.inputs)
        )
        regions = tuple(
            RegionPlan(each, region.read(given), _returned(region, each, flow.outputs))
            for region, each in zip(wiring.regions, plans, strict=True)
        )
        why = _why(wiring, context.precisions, flow.inputs, plans)
        how, outputs = "regions", tuple(flow.outputs)
        if not any(each.is_changed for each in plans):
            how, given, outputs = "bind", set_all(FULL, given), without_weak(outputs)
        return Action(how, given, outputs, "inside", why, scope_rule, regions=regions)

    def _join(self, precisions: Sequence[Precision]) -> Precision:
        """Return the precision of a value that is one of several."""
        if precisions[0] is None:
            return None
        return widest(precisions) if self._fit(precisions) else FULL


def _returned(region: Region, plan: Plan, outputs: Sequence[Precision]) -> Precisions:
    """Return the precisions in which a region returns what the equation does."""
    return tuple(
        own if i is None else outputs[i]
        for i, own in zip(region.outputs, plan.outputs, strict=True)
    )


def _why(
    wiring: Wiring,
    begun: Precisions,
    inputs: Sequence[Precision],
    plans: Sequence[Plan],
) -> str:
    """Return "fix-point" if a carry is full only because one of its two ends is."""
    for region, plan in zip(wiring.regions, plans, strict=True):
        returned = dict(zip(region.outputs, plan.outputs, strict=True))
        for output, i in wiring.carry:
            if inputs[i] == FULL and LOW in (begun[i], returned.get(output)):
                return "fix-point"
    return "inside"
