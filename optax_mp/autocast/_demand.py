"""The wishes of a value's readers: if all compute in float32, it stays float32.

In a softmax, an `exp` reads a difference and runs in float32. Rounding the difference
to 16 bits would save nothing. Wants are found backwards, from the outputs of a jaxpr to
its inputs, before any precision is chosen.
"""

from collections.abc import Sequence
from typing import Any

from optax_mp._jax._control_flow import Region, can_convert, wiring_of
from optax_mp._jax._jaxpr import Equation, Jaxpr, cache_by_jaxpr, is_literal, open_jaxpr
from optax_mp.autocast._lattice import takes_part
from optax_mp.autocast._rules import Rule, Rules

# True if all readers of a value compute in float32; None if no reader cares.
Want = bool | None
Wants = tuple[Want, ...]


def is_better_full(equation: Equation, wants: Sequence[Want]) -> bool:
    """Return whether its readers make float32 the better choice for an operation."""
    name = equation.primitive.name
    if name == "add_any":
        # It sums the gradients of two uses, perhaps of a weight: in float32, unless
        # something reads the sum in 16 bits.
        return False not in wants
    # A select_n rounds nothing, and its derivative would keep zeros in float32.
    return True in wants and False not in wants and name != "select_n"


class Demand:
    """Finds wants by one set of rules, once for each jaxpr."""

    def __init__(self, rules: Rules) -> None:
        """Find wants by `rules`."""
        self._rules = rules
        self.wants_within = cache_by_jaxpr(self._wants_within)

    def _wants_within(
        self, jaxpr: Jaxpr, outputs: Wants, scope_rule: Rule | None
    ) -> dict[Any, Want]:
        """Return the wants of each variable of a jaxpr, from its outputs' wants.

        A variable is missing if nothing reads it, or no reader cares.
        """
        wants: dict[Any, Want] = {}

        def read(atom: Any, want: Want) -> None:
            if not is_literal(atom) and want is not None:
                wants[atom] = _combine([wants.get(atom), want])

        for atom, want in zip(jaxpr.outvars, outputs, strict=True):
            read(atom, want)
        scopes = [self._rules.scope_rule_of(x, scope_rule) for x in jaxpr.eqns]
        full = self._float32_results(jaxpr, scopes)
        for equation, scope in reversed(list(zip(jaxpr.eqns, scopes, strict=True))):
            outs = tuple(map(wants.get, equation.outvars))
            ins = self._wants_of_inputs(equation, outs, scope)
            if equation.primitive.name == "sub" and not full.isdisjoint(
                atom for atom in equation.invars if not is_literal(atom)
            ):
                # A difference from a float32 value, as in a log-softmax, is computed in
                # float32, so rounding the other value would save nothing.
                ins = (True,) * len(ins)
            for atom, want in zip(equation.invars, ins, strict=True):
                read(atom, want)
        return wants

    def _float32_results(self, jaxpr: Jaxpr, scopes: Sequence[Rule | None]) -> set[Any]:
        """Return the variables that a float32 operation computes."""
        full: set[Any] = set()
        for equation, scope in zip(jaxpr.eqns, scopes, strict=True):
            if not can_convert(equation):
                rule, _ = self._rules.rule_of(equation, scope)
                inputs = [atom for atom in equation.invars if not is_literal(atom)]
                if rule in ("f32", "low_f32") or (
                    rule == "widest" and not full.isdisjoint(inputs)
                ):
                    full.update(equation.outvars)
        return full

    def _wants_of_inputs(
        self, equation: Equation, outs: Wants, scope: Rule | None
    ) -> Wants:
        count = len(equation.invars)
        if scope == "as_written":
            return (True,) * count
        if can_convert(equation):
            return self.wants_through(equation, outs, scope)[0]
        if equation.primitive.name == "convert_element_type":
            atoms = (*equation.invars, *equation.outvars)
            same = len({atom.aval.dtype for atom in atoms}) == 1
            return outs if same else (False,)
        rule, _ = self._rules.rule_of(equation, scope)
        if rule in ("f32", "as_written"):
            return (True,) * count
        if rule in ("widest", "own"):
            # A comparison does not care: its result is not a float, so never rounded.
            cares = any(map(takes_part, equation.outvars))
            return (is_better_full(equation, outs) if cares else None,) * count
        return (False,) * count

    def wants_through(
        self, equation: Equation, outs: Wants, scope: Rule | None
    ) -> tuple[Wants, Wants]:
        """Return the wants of the inputs and outputs of an equation with regions.

        The next iteration of a loop counts among the readers of its outputs.
        """

        def region_inputs(region: Region, wanted: Wants) -> Wants:
            jaxpr, _ = open_jaxpr(region.jaxpr)
            wants = self.wants_within(jaxpr, wanted, scope)
            return tuple(map(wants.get, jaxpr.invars))

        wiring = wiring_of(equation)
        ins, outs_in_loop = wiring.backward(outs, region_inputs, _combine)
        return tuple(ins), tuple(outs_in_loop)


def _combine(wants: Sequence[Want]) -> Want:
    """Return what several readers want together."""
    caring = [want for want in wants if want is not None]
    return all(caring) if caring else None
