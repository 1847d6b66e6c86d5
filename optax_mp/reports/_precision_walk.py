"""All products of a function: how often each runs, and what makes it float32."""

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from optax_mp._jax._control_flow import has_regions, run_count, wiring_of
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    Jaxpr,
    is_literal,
    jaxprs_within,
    open_jaxpr,
)
from optax_mp._jax._products import flops_of, is_product, operand_indices
from optax_mp._jax._source import is_function_of_jax, is_transposed, source_lines
from optax_mp._jax._wiring import Region
from optax_mp.amp._rules import Rule, Rules, default_amp_rules
from optax_mp.reports._precision_origins import (
    Origin,
    OriginFinder,
    Origins,
    Value,
    is_wide_value,
    join,
    meet,
    union,
)

# Operations that multiply matrices, and show no jaxpr.
_CLOSED = ("dot", "matmul", "attention", "gemm", "ffi_call")


@dataclass(frozen=True)
class Surroundings:
    """What is known of all that an equation is inside of.

    Attributes:
        at: the equation whose lines count, because this one is in a function of JAX.
        outer: the equation that it is inside of.
        is_backward: whether it is in the backward pass.
        scope_rule: the rule of amp for the scopes around.
    """

    at: Equation = None
    outer: Equation = None
    is_backward: bool = False
    scope_rule: Rule | None = None

    def place_of(self, equation: Equation) -> Equation:
        """Return the equation whose lines an equation is written at."""
        if self.at or not self.outer or source_lines(equation).user:
            return self.at or equation
        return self.outer


@dataclass(frozen=True)
class FoundProduct:
    """A product in a jaxpr.

    Attributes:
        equation: the equation.
        at: the equation whose lines it is written at.
        is_backward: whether it is in the backward pass.
        origins: what makes its operands float32.
        amp_rule: the rule that amp has for it, and what decided on that.
        count: how often it runs; 0 in a branch with fewer FLOPs than another.
        is_in_while: whether that is one iteration of a loop of unknown length.
    """

    equation: Equation
    at: Equation
    is_backward: bool
    origins: Origins
    amp_rule: tuple[Rule, str]
    count: int = 1
    is_in_while: bool = False

    @property
    def flops(self) -> int:
        """The FLOPs of all runs."""
        return self.count * flops_of(self.equation)


class Walk:
    """Follows values through jaxprs, and finds the products on the way.

    Attributes:
        unseen: operations that multiply, or hold products, and cannot be looked into,
            each with the equation whose lines it is written at.
    """

    def __init__(self) -> None:
        """Begin with nothing found."""
        self.unseen: dict[int, tuple[Equation, Equation]] = {}
        self._origins = OriginFinder()
        # What made the products float32 that a variable goes into. Variables inside of
        # an equation are in a map of their own: another one may have the same jaxpr.
        self._origins_by_operand: ChainMap[Any, Origins] = ChainMap()
        self._rules = Rules(default_amp_rules, jnp.bfloat16)

    def follow(
        self, jaxpr: AnyJaxpr, inputs: Sequence[Value], around: Surroundings
    ) -> tuple[list[Value], list[FoundProduct]]:
        """Return what is known of the outputs of a jaxpr, and the products in it."""
        jaxpr, consts = open_jaxpr(jaxpr)
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        if consts:
            known.update((var, _constant(var)) for var in jaxpr.constvars)
        found: list[FoundProduct] = []

        def value(atom: Any, at: Equation) -> Value:
            if is_literal(atom):
                return self._origins.of_literal(atom, at)
            return known.get(atom, Value())

        for equation in _live_equations(jaxpr):
            at = around.at or equation
            given = [value(atom, at) for atom in equation.invars]
            if has_regions(equation):
                outputs, products = self._follow_regions(equation, given, around)
                found += products
            else:
                outputs = self._origins.of_outputs(
                    equation, given, at, around.is_backward
                )
                if is_product(equation):
                    found.append(self._product(equation, given, around))
                elif _hides_products(equation):
                    self.unseen[id(equation)] = equation, around.place_of(equation)
            known.update(zip(equation.outvars, outputs, strict=True))
        outvars: Any = jaxpr.outvars
        return [Value() if is_literal(x) else known[x] for x in outvars], found

    def _product(
        self, equation: Equation, inputs: Sequence[Value], around: Surroundings
    ) -> FoundProduct:
        at = around.place_of(equation)
        operands = [inputs[i] for i in operand_indices(equation)]
        is_backward = around.is_backward or is_transposed(equation)
        origins = meet(operands)
        if origins and any(value.is_gradient for value in operands):
            origins = self._origins_of_forward(operands) or origins
        else:
            self._remember(equation, operands, origins, at)
        scope_rule = self._rules.scope_rule_of(equation, around.scope_rule)
        amp_rule = self._rules.rule_of(equation, scope_rule)
        return FoundProduct(equation, at, is_backward, origins, amp_rule)

    def _remember(
        self,
        equation: Equation,
        operands: Sequence[Value],
        origins: Origins,
        at: Equation,
    ) -> None:
        """Keep in mind what makes the gradients of a product float32."""
        result = equation.outvars[0]
        if not is_wide_value(result):
            return
        origins = origins or (Origin("result", result.aval.dtype.name, at),)
        for value in operands:
            _add(self._origins_by_operand, value.source, origins)

    def _origins_of_forward(self, operands: Sequence[Value]) -> Origins:
        """Return what made the product float32 whose gradient these operands give.

        A gradient is float32 because its value is. It is multiplied with the other
        operand of the product in the forward pass, by which that is found.
        """
        sources = [value.source for value in operands if not value.is_gradient]
        known = self._origins_by_operand
        return union(known.get(x, ()) for x in sources)

    def _follow_regions(
        self, equation: Equation, inputs: Sequence[Value], around: Surroundings
    ) -> tuple[list[Value], list[FoundProduct]]:
        wiring, found = wiring_of(equation), {}
        inside = Surroundings(
            around.at,
            around.place_of(equation),
            around.is_backward or is_transposed(equation),
            self._rules.scope_rule_of(equation, around.scope_rule),
        )

        def through(region: Region, given: tuple[Value, ...]) -> list[Value]:
            within = inside
            if equation.primitive.name in _JITS and is_function_of_jax(region.jaxpr):
                within = replace(inside, at=around.at or equation)
            # In a loop, the last visit is the one that knows most.
            outputs, found[id(region)] = self.follow(region.jaxpr, given, within)
            return outputs

        outside = self._origins_by_operand
        self._origins_by_operand = inner = outside.new_child()
        outputs = wiring.forward(inputs, through, join).outputs
        self._origins_by_operand = outside
        names = _names_outside(equation, inputs, outputs)
        outputs = [x._replace(source=names.get(x.source)) for x in outputs]
        for source, origins in inner.maps[0].items():
            _add(outside, names.get(source), origins)
        groups = [found[id(region)] for region in wiring.regions]
        if wiring.deciding:
            groups = _count_costliest(groups)
        count = run_count(equation)
        products = [
            replace(
                each,
                count=each.count * (1 if count is None else count),
                is_in_while=each.is_in_while or count is None,
            )
            for group in groups
            for each in group
        ]
        return outputs, products


_JITS = ("jit", "pjit")


def _live_equations(jaxpr: Jaxpr) -> list[Equation]:
    """Return the equations whose results are used, as only those are compiled."""
    used, live = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(map(id, equation.outvars)):
            live.append(equation)
            used.update(map(id, equation.invars))
    return live[::-1]


def _names_outside(
    equation: Equation, inputs: Sequence[Value], outputs: Sequence[Value]
) -> dict[Any, Any]:
    """Return the variables outside of an equation for the sources of its outputs."""
    names: dict[Any, Any] = {value.source: value.source for value in inputs}
    for value, var in zip(outputs, equation.outvars, strict=True):
        names.setdefault(value.source, var)
    return {**names, None: None}


def _add(known: MutableMapping[Any, Origins], source: Any, origins: Origins) -> None:
    if source is not None:
        known[source] = union([known.get(source, ()), origins])


def _constant(var: Any) -> Value:
    if not is_wide_value(var):
        return Value(source=var)
    return Value((Origin("constant", var.aval.str_short()),), var, is_computed=False)


def _count_costliest(groups: list[list[FoundProduct]]) -> list[list[FoundProduct]]:
    """Return the products of branches, with count 0 for all but one branch's.

    XLA's cost analysis counts the costliest, too.
    """
    costs = [sum(each.flops for each in group) for group in groups]
    costliest = costs.index(max(costs))
    return [
        group if i == costliest else [replace(each, count=0) for each in group]
        for i, group in enumerate(groups)
    ]


def _hides_products(equation: Equation) -> bool:
    inner = jaxprs_within(equation)
    if inner:
        return any(map(has_products, inner))
    return any(word in equation.primitive.name for word in _CLOSED)


def has_products(jaxpr: AnyJaxpr) -> bool:
    """Return whether a jaxpr has a product, at any depth."""
    return any(
        is_product(equation) or any(map(has_products, jaxprs_within(equation)))
        for equation in open_jaxpr(jaxpr)[0].eqns
    )


def has_backward_pass(jaxpr: AnyJaxpr) -> bool:
    """Return whether a function computes a gradient itself."""
    return any(
        is_transposed(equation) or any(map(has_backward_pass, jaxprs_within(equation)))
        for equation in open_jaxpr(jaxpr)[0].eqns
    )
