"""The wishes of a value's readers: if all compute in float32, it stays float32.

In a softmax, an `exp` reads a difference and runs in float32. Rounding the difference
to 16 bits would save nothing. Wants are found backwards, from the outputs of a jaxpr to
its inputs, before any precision is chosen.
"""

from collections.abc import Sequence
from typing import Any

from optax_mp._jax._control_flow import Region, wiring_of
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

        A variable that nothing reads is missing.
        """
        wants: dict[Any, Want] = {}

        def read(atoms: Sequence[Any], each: Sequence[Want]) -> None:
            for atom, want in zip(atoms, each, strict=True):
                if not is_literal(atom):
                    wants[atom] = _combine([wants.get(atom), want])

        read(jaxpr.outvars, outputs)
        ruled = []
        full: set[int] = set()  # the results of float32 operations
        for equation in jaxpr.eqns:
            scope = self._rules.scope_rule_of(equation, scope_rule)
            rule, _ = self._rules.rule_of(equation, scope)
            reads_full = not full.isdisjoint(map(id, equation.invars))
            if rule in ("f32", "low_f32") or (rule == "widest" and reads_full):
                full.update(map(id, equation.outvars))
            # A difference from a float32 value, as in a log-softmax, is computed in
            # float32, so rounding the other value would save nothing.
            is_full = reads_full and equation.primitive.name == "sub"
            ruled.append((equation, "f32" if is_full else rule, scope))
        for equation, rule, scope in reversed(ruled):
            outs = tuple(map(wants.get, equation.outvars))
            if rule == "regions":
                ins, _ = self.wants_through(equation, outs, scope)
            else:
                ins = [_want_of_inputs(equation, rule, outs)] * len(equation.invars)
            read(equation.invars, ins)
        return wants

    def wants_through(
        self, equation: Equation, outs: Wants, scope: Rule | None
    ) -> tuple[list[Want], list[Want]]:
        """Return the wants of the inputs and outputs of an equation with regions.

        The next iteration of a loop counts among the readers of its outputs.
        """

        def region_inputs(region: Region, wanted: Wants) -> Wants:
            jaxpr, _ = open_jaxpr(region.jaxpr)
            wants = self.wants_within(jaxpr, wanted, scope)
            return tuple(map(wants.get, jaxpr.invars))

        return wiring_of(equation).backward(outs, region_inputs, _combine)


def _want_of_inputs(equation: Equation, rule: Rule, outs: Wants) -> Want:
    """Return what an equation without regions wants of its inputs."""
    if rule == "cast":
        (read,), (made,) = equation.invars, equation.outvars
        return outs[0] if read.aval.dtype == made.aval.dtype else False
    if rule in ("widest", "own"):
        # A comparison does not care: its result is not a float, so never rounded.
        cares = any(map(takes_part, equation.outvars))
        return is_better_full(equation, outs) if cares else None
    return rule in ("f32", "as_written")


def _combine(wants: Sequence[Want]) -> Want:
    """Return what several readers want together."""
    caring = [want for want in wants if want is not None]
    return all(caring) if caring else None
