"""All products of a function: how often each runs, and what makes it float32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from optax_mp._jax._control_flow import has_regions, run_count, wiring_of
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    is_literal,
    jaxprs_within,
    open_jaxpr,
)
from optax_mp._jax._source import is_function_of_jax, is_transposed
from optax_mp._jax._wiring import Region
from optax_mp.amp._rules import Rule, Rules, default_amp_rules
from optax_mp.reports._precision_origins import (
    Origin,
    OriginFinder,
    Origins,
    is_wide_value,
    join,
    meet,
)
from optax_mp.reports._precision_products import flops_of, is_product

# Operations that multiply matrices, and show no jaxpr.
_CLOSED = ("dot", "matmul", "attention", "gemm", "ffi_call")


@dataclass(frozen=True)
class Surroundings:
    """What is known of all that an equation is inside of.

    Attributes:
        at: the equation whose lines count, because this one is in a function of JAX.
        is_backward: whether it is in the backward pass.
        scope_rule: the rule of amp for the scopes around.
    """

    at: Equation = None
    is_backward: bool = False
    scope_rule: Rule | None = None


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
        is_in_while: whether that is for one iteration, of nobody knows how many.
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
        self._rules = Rules(default_amp_rules, jnp.bfloat16)

    def follow(
        self, jaxpr: AnyJaxpr, inputs: Sequence[Origins], around: Surroundings
    ) -> tuple[list[Origins], list[FoundProduct]]:
        """Return the origins of the outputs of a jaxpr, and the products in it."""
        jaxpr, consts = open_jaxpr(jaxpr)
        known: dict[Any, Origins] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars if consts else ():
            known[var] = _of_constant(var)
        found: list[FoundProduct] = []
        for equation in jaxpr.eqns:
            at = around.at or equation
            given = [
                self._origins.of_literal(atom, at)
                if is_literal(atom)
                else known.get(atom, ())
                for atom in equation.invars
            ]
            if has_regions(equation):
                outputs, products = self._follow_regions(equation, given, around)
                found += products
            else:
                is_backward = around.is_backward or is_transposed(equation)
                outputs = self._origins.of_outputs(equation, given, at, is_backward)
                found += self._product(equation, given, around)
            known.update(zip(equation.outvars, outputs, strict=True))
        outvars: Any = jaxpr.outvars
        return [() if is_literal(x) else known.get(x, ()) for x in outvars], found

    def _product(
        self, equation: Equation, inputs: Sequence[Origins], around: Surroundings
    ) -> Iterator[FoundProduct]:
        """Yield an equation if it is a product; note one that may hide products."""
        at = around.at or equation
        if not is_product(equation):
            if _hides_products(equation):
                self.unseen[id(equation)] = equation, at
            return
        scope_rule = self._rules.scope_rule_of(equation, around.scope_rule)
        yield FoundProduct(
            equation,
            at,
            around.is_backward or is_transposed(equation),
            meet(inputs[:2]),  # Others are the sizes of groups.
            self._rules.rule_of(equation, scope_rule),
        )

    def _follow_regions(
        self, equation: Equation, inputs: Sequence[Origins], around: Surroundings
    ) -> tuple[list[Origins], list[FoundProduct]]:
        wiring, found = wiring_of(equation), {}
        inside = Surroundings(
            around.at,
            around.is_backward or is_transposed(equation),
            self._rules.scope_rule_of(equation, around.scope_rule),
        )

        def through(region: Region, given: tuple[Origins, ...]) -> list[Origins]:
            within = inside
            if equation.primitive.name in _JITS and is_function_of_jax(region.jaxpr):
                within = replace(inside, at=around.at or equation)
            # In a loop, the last visit is the one that knows most.
            outputs, found[id(region)] = self.follow(region.jaxpr, given, within)
            return outputs

        outputs = wiring.forward(inputs, through, join).outputs
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


def _of_constant(var: Any) -> Origins:
    return (Origin("constant", var.aval.str_short()),) if is_wide_value(var) else ()


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
