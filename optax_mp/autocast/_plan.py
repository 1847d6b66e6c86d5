"""The precision of each value of a jaxpr: a dataflow analysis, without tracing.

Equations are planned in order. The plan of one depends on the precisions of its inputs,
its rule, and the wants of the readers of its outputs (`_demand`). A jaxpr inside an
equation, of a loop, branch or `jit`, is a region, and its `Wiring` says which values go
in and out. A loop's carry has one precision in all iterations, so the body is planned
again until nothing changes: a fixed point.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_mp.autocast import _demand, _lattice, _rules
from optax_mp.autocast._lattice import is_exact
from optax_mp.core._dtypes import bits, is_floating
from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._extend import Jaxpr
from optax_mp.jaxprs import _tracing
from optax_mp.jaxprs._control_flow import Region, wiring_of
from optax_mp.jaxprs._hidden import name_of
from optax_mp.jaxprs._primitives import MOVES, REPEATS
from optax_mp.jaxprs._source import source_line


@dataclass(frozen=True, eq=False)
class Action:
    """How one equation runs.

    Attributes:
        how: `"bind"`: its inputs are cast and it is bound; `"same"`: it returns its
            input; `"function"`: a user's function binds it; `"regions"`: it is bound
            with other regions.
        inputs: the precision that each input is cast to; a function casts them itself.
        outputs: the precisions of its outputs.
        rule: the rule that it follows.
        why: the reason, in the words of `AmpOperation`; `"inside"` for regions.
        params: its parameters, if they change.
        regions: the plans of its regions.
        scope_rule: the rule of the scope that its regions are in.
    """

    how: str
    inputs: _lattice.Precisions
    outputs: _lattice.Precisions
    rule: Any
    why: str
    params: dict[str, Any] | None = None
    regions: tuple["Plan", ...] = ()
    scope_rule: _rules.Rule | None = None

    @property
    def is_changed(self) -> bool:
        """Whether anything differs from the equation as written."""
        is_low = _lattice.LOW in self.inputs or _lattice.LOW in self.outputs
        return is_low or self.how in ("function", "regions")


@dataclass(frozen=True, eq=False)
class Plan:
    """How one jaxpr runs.

    Attributes:
        inputs: the precisions of its inputs.
        actions: an action for each equation.
        outputs: the precisions of its outputs.
        is_changed: whether anything differs from the jaxpr as written.
    """

    inputs: _lattice.Precisions
    actions: tuple[Action, ...]
    outputs: _lattice.Precisions
    is_changed: bool

    def sites(
        self, jaxpr: _jaxpr.AnyJaxpr, around: tuple[_jaxpr.Equation, ...] = ()
    ) -> Iterator["Site"]:
        """Yield the equations of its jaxpr, each after those in its regions."""
        equations = _jaxpr.open_jaxpr(jaxpr)[0].eqns
        for equation, action in zip(equations, self.actions, strict=True):
            regions = wiring_of(equation).regions if action.regions else ()
            for region, plan in zip(regions, action.regions, strict=True):
                yield from plan.sites(region.jaxpr, (equation, *around))
            yield Site(equation, action, around)


class Site(NamedTuple):
    """An equation, and how it runs.

    Attributes:
        equation: the equation.
        action: how it runs.
        around: the equations around it, innermost first.
    """

    equation: _jaxpr.Equation
    action: Action
    around: tuple[_jaxpr.Equation, ...]

    @property
    def line(self) -> str:
        """Its line, or the line of the nearest equation around it that has one."""
        # A function of JAX has a line only where it is called.
        lines = map(source_line, (self.equation, *self.around))
        return next(filter(None, lines), "")


def warnings_of_unknown(sites: Iterable[Site]) -> tuple[str, ...]:
    """Return a warning of each operation whose products amp does not know to change."""
    unknown = (x for x in sites if x.action.why == "unknown")
    return tuple(dict.fromkeys(map(_warning_of_unknown, unknown)))


def _warning_of_unknown(site: Site) -> str:
    where = f"{name_of(site.equation)} {site.line}".rstrip()
    return (
        f"expected operations whose products it can run in 16 bits, got {where}, whose "
        "products stay float32; use another operation, or put it into `amp_stop()`."
    )


class Planner:
    """Plans jaxprs by one set of rules, each region once."""

    def __init__(self, rules: _rules.Rules) -> None:
        """Plan by `rules`."""
        self.rules = rules
        info = jnp.finfo(rules.compute_dtype)
        self._smallest, self._largest = float(info.tiny), float(info.max)
        # Without the cache, a nested loop would be planned again in every step of the
        # search for the outer loop.
        self._plan_cached = _tracing.cache_by_jaxpr(self.plan)

    def plan(
        self,
        jaxpr: Jaxpr,
        inputs: _lattice.Precisions,
        scope: _rules.Rule | None,
    ) -> Plan:
        """Plan a jaxpr.

        Args:
            jaxpr: the jaxpr.
            inputs: the precisions of its inputs.
            scope: the rule of the scopes around.
        """
        # An iteration of a scan reads a slice.
        own_inputs = map(_lattice.moved, inputs, jaxpr.invars)
        known = (*_lattice.argument_precisions(jaxpr.constvars), *own_inputs)
        of_vars = dict(zip((*jaxpr.constvars, *jaxpr.invars), known, strict=True))

        def precision(atom: Any) -> _lattice.Precision:
            return (
                _lattice.literal_precision(atom)
                if _jaxpr.is_literal(atom)
                else of_vars[atom]
            )

        wanted = _demand.wants_of(jaxpr, self.rules, scope)
        actions: list[Action] = []
        for equation in jaxpr.eqns:
            precisions = tuple(map(precision, equation.invars))
            wants = tuple(map(wanted.get, equation.outvars))
            own_scope = self.rules.scope_rule_of(equation, scope)
            action = self._plan_equation(equation, precisions, wants, own_scope)
            actions.append(action)
            of_vars.update(zip(equation.outvars, action.outputs, strict=True))
        is_changed = _lattice.LOW in inputs or any(
            action.is_changed for action in actions
        )
        outputs = tuple(map(precision, jaxpr.outvars))
        return Plan(inputs, _without_round_trips(jaxpr, actions), outputs, is_changed)

    def _plan_equation(
        self,
        equation: _jaxpr.Equation,
        precisions: _lattice.Precisions,
        wants: Sequence[_demand.Want],
        scope: Any,
    ) -> Action:
        """Plan an equation.

        Args:
            equation: the equation.
            precisions: the precisions of its inputs.
            wants: what the readers of its outputs want.
            scope: the rule of the scope that it is in, or None.
        """
        is_bias_add = _lattice.adds_bias(equation, precisions)
        rule, why = self.rules.rule_of(equation, scope, is_bias_add)
        if rule == "regions":
            return self._plan_regions(equation, precisions, scope)
        if rule == "cast":
            return self._plan_cast(equation, precisions)
        if callable(rule):
            return self._plan_function(equation, precisions, rule, why)
        if rule == "own":
            # Such a primitive returns one output for each input.
            own = _lattice.as_computed(precisions)
            return Action("bind", own, own, rule, why)
        name = equation.primitive.name
        if (
            rule == "widest"
            and name in REPEATS
            and isinstance(precisions[0], _lattice.Weak)
        ):
            # A repeated literal stays weak: later operations decide.
            return Action("bind", (_lattice.FULL,), precisions, rule, "literal")
        outputs = _lattice.full_precisions(equation.outvars)
        target = _lattice.LOW
        # Matrix products take the most time: low even if inputs or readers are full.
        follows = rule in ("widest", "rounded")
        if rule in ("f32", "as_written"):
            target = _lattice.FULL
        elif not self._fit(precisions):
            target, why = _lattice.FULL, "literal"
        elif follows and _demand.is_better_full(equation, wants):
            target, why = _lattice.FULL, "sink"
        elif follows and _lattice.widest(precisions) == _lattice.FULL:
            target, why = _lattice.FULL, "inputs"
        result = _lattice.LOW if (rule, why) == ("rounded", "inputs") else target
        inputs, outputs = (
            _lattice.set_all(target, precisions),
            _lattice.set_all(result, outputs),
        )
        if (
            name in MOVES
            and result == _lattice.FULL
            and isinstance(precisions[0], _lattice.Argument)
        ):
            outputs = tuple(_lattice.moved(precisions[0], x) for x in equation.outvars)
        params = equation.params
        if target == _lattice.LOW and params.get("preferred_element_type") is not None:
            # With a float32 result, products of the backward pass would have inputs of
            # two dtypes. Hardware accumulates in float32 anyway.
            params = params | {"preferred_element_type": self.rules.compute_dtype}
        return Action("bind", inputs, outputs, rule, why, params)

    def _plan_function(
        self,
        equation: _jaxpr.Equation,
        precisions: _lattice.Precisions,
        rule: Any,
        why: str,
    ) -> Action:
        """Plan an equation that a user's function binds.

        The only way to know what a function does is to call it.
        """
        dtype, params = self.rules.compute_dtype, {}

        def run(*inputs: Any) -> Sequence[Any]:
            invars, new_params = _rules.call_function(rule, dtype, equation, inputs)
            params.update(new_params)
            return invars

        avals = [
            _tracing.with_dtype(atom.aval, dtype) if x == _lattice.LOW else atom.aval
            for atom, x in zip(equation.invars, precisions, strict=True)
        ]
        # It is not bound: a collective exists only inside of its shard_map.
        new = _tracing.trace_jaxpr(run, avals).out_avals
        are_low = [bits(x.dtype) <= 16 if is_floating(x) else None for x in new]
        result = params.get("preferred_element_type")
        is_low = False not in are_low if result is None else bits(result) <= 16
        outputs = _lattice.full_precisions(equation.outvars)
        pairs = zip(precisions, are_low, strict=True)
        inputs = tuple(_lattice.LOW if x and low else x for x, low in pairs)
        outputs = _lattice.set_all(_lattice.LOW, outputs) if is_low else outputs
        return Action("function", inputs, outputs, rule, why)

    def _fit(self, precisions: Sequence[_lattice.Precision]) -> bool:
        """Return whether the range of the compute dtype holds all literals."""
        values = [x.value for x in precisions if isinstance(x, _lattice.Weak)]
        # 0 and infinity fit any dtype. Numbers below `tiny` may be flushed to 0.
        sizes = [abs(x) for x in values if x and np.isfinite(x)]
        return all(self._smallest <= size <= self._largest for size in sizes)

    def _plan_cast(
        self, equation: _jaxpr.Equation, precisions: _lattice.Precisions
    ) -> Action:
        """Plan a change of dtype. The user asked for it, so it is honoured."""
        old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        outputs = _lattice.full_precisions(equation.outvars)
        if old == new and precisions[0] is not None:
            # It only changes whether the type is weak.
            return Action("same", precisions, precisions, "own", "cast")
        if precisions[0] == _lattice.LOW and new == self.rules.compute_dtype:
            return Action("same", precisions, outputs, "own", "cast")
        if old == np.bool_ and outputs[0]:
            outputs = (_lattice.Weak(),)  # 0 and 1 are exact in any dtype
        if old in (jnp.bfloat16, jnp.float16) and outputs[0]:
            # A bias in 16 bits is cast before it is added.
            is_exact = old == self.rules.compute_dtype
            outputs = _lattice.argument_precisions(equation.outvars, is_exact)
        return Action(
            "bind", _lattice.as_computed(precisions), outputs, "as_written", "cast"
        )

    def _plan_regions(
        self, equation: _jaxpr.Equation, precisions: _lattice.Precisions, scope: Any
    ) -> Action:
        wiring = wiring_of(equation)
        carried = {i for _, i in wiring.carry}
        # From the second iteration on a carry is a computed value.
        computed = _lattice.as_computed(precisions)
        initial = [computed[i] if i in carried else x for i, x in enumerate(precisions)]

        def plan_region(region: Region, inputs: _lattice.Precisions) -> Plan:
            jaxpr, _ = _jaxpr.open_jaxpr(region.jaxpr)
            return self._plan_cached(jaxpr, inputs, scope)

        def outputs_of(
            region: Region, inputs: _lattice.Precisions
        ) -> _lattice.Precisions:
            outputs = plan_region(region, inputs).outputs
            return _lattice.as_computed(outputs) if wiring.repeats else outputs

        flow = wiring.forward(initial, outputs_of, self._join)
        # The search has made these plans already: they come from the cache.
        plans = tuple(plan_region(x, x.read(flow.inputs)) for x in wiring.regions)
        how, inputs, outputs = "regions", list(flow.inputs), tuple(flow.outputs)
        if not any(plan.is_changed for plan in plans):
            # Bound as written, it takes and returns values as written.
            how, inputs, outputs = (
                "bind",
                _lattice.set_all(_lattice.FULL, inputs),
                _lattice.as_computed(outputs),
            )
        elif equation.primitive.name == "scan":
            for i, x in enumerate(inputs):
                # Values that every iteration reads go in as written and are cast
                # inside, so that their gradients are summed over the iterations in
                # float32.
                if i in wiring.summed and x == _lattice.LOW:
                    inputs[i] = _lattice.FULL
                # Slices for one iteration, such as the weights of a layer, go in low if
                # they were cast before the loop, so that no wide copy of all exists.
                elif i not in (*carried, *wiring.summed) and is_exact(x):
                    inputs[i] = _lattice.LOW
        why = "inside"
        return Action(how, tuple(inputs), outputs, why, why, None, plans, scope)

    def _join(self, precisions: Sequence[_lattice.Precision]) -> _lattice.Precision:
        """Return the precision of a value that may be any of several."""
        if precisions[0] is None:
            return None
        return _lattice.widest(precisions) if self._fit(precisions) else _lattice.FULL


def _without_round_trips(jaxpr: Jaxpr, actions: Sequence[Action]) -> tuple[Action, ...]:
    """Remove casts from the compute dtype whose only reader casts back.

    A loop would save the results of such casts for its backward pass: a copy of all
    weights.
    """
    reads: Any = defaultdict(
        list, {id(atom): [_lattice.FULL] for atom in jaxpr.outvars}
    )
    pairs = list(zip(jaxpr.eqns, actions, strict=True))
    for equation, action in pairs:
        for atom, precision in zip(equation.invars, action.inputs, strict=True):
            reads[id(atom)].append(precision)
    return tuple(
        replace(action, how="same", outputs=(_lattice.LOW,))
        if action.why == "cast"
        and is_exact(action.outputs[0])
        and reads[id(equation.outvars[0])] == [_lattice.LOW]
        else action
        for equation, action in pairs
    )
