"""What those that read a value want of it: where all compute in float32, so can it.

The subtraction in a softmax is read by an `exp`, which runs in float32: to round the
difference to 16 bits first would save nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

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
from optax_mp.amp._remembered import remembered
from optax_mp.amp._rules import Rule, Rules
from optax_mp.amp._states import takes_part

# Whether all that read a value compute in float32; None if none cares.
Want = bool | None
Wants = tuple[Want, ...]


def sinks(equation: Equation, wants: Sequence[Want]) -> bool:
    """Return whether an operation is better done in float32, as all want that of it."""
    name = equation.primitive.name
    if name == "add_any":
        # The gradients of two uses, perhaps of a weight: added up in float32, unless
        # something reads them on in 16 bits.
        return False not in wants
    # Not a choice between values: that rounds nothing, and its derivative would keep
    # zeros in float32.
    return True in wants and False not in wants and name != "select_n"


class Demand:
    """Finds wants by one set of rules; those of one jaxpr, once."""

    def __init__(self, rules: Rules) -> None:
        """Find wants by `rules`."""
        self._rules = rules
        self.within = remembered(self._within)

    def _within(self, jaxpr: Jaxpr, outputs: Wants, scope: Rule | None) -> dict:
        """Return what is wanted of each variable of a jaxpr, given its outputs' wants.

        A variable that nothing reads, or nothing that cares, is not among them.
        """
        wants: dict[Any, Want] = {}

        def read(atom: Any, want: Want) -> None:
            if not is_literal(atom) and want is not None:
                wants[atom] = _both(wants.get(atom), want)

        for atom, want in zip(jaxpr.outvars, outputs, strict=True):
            read(atom, want)
        scopes = [self._rules.in_scope(equation, scope) for equation in jaxpr.eqns]
        full = self._made_in_float32(jaxpr, scopes)
        for equation, within in reversed(list(zip(jaxpr.eqns, scopes, strict=True))):
            outs = tuple(map(wants.get, equation.outvars))
            ins = self._of_inputs(equation, outs, within)
            if equation.primitive.name == "sub" and not full.isdisjoint(
                atom for atom in equation.invars if not is_literal(atom)
            ):
                # A difference from float32, as in a log-softmax, is one in float32, and
                # what it is taken of is better not rounded.
                ins = (True,) * len(ins)
            for atom, want in zip(equation.invars, ins, strict=True):
                read(atom, want)
        return wants

    def _made_in_float32(self, jaxpr: Jaxpr, scopes: Sequence[Rule | None]) -> set[Any]:
        """Return the variables that are float32 by the rule of what makes them."""
        made: set[Any] = set()
        for equation, scope in zip(jaxpr.eqns, scopes, strict=True):
            if not kind(equation):
                rule, _ = self._rules.of(equation, scope)
                inputs = [atom for atom in equation.invars if not is_literal(atom)]
                if rule == "f32" or (rule == "widest" and not made.isdisjoint(inputs)):
                    made.update(equation.outvars)
        return made

    def _of_inputs(self, equation: Equation, outs: Wants, scope: Rule | None) -> Wants:
        count = len(equation.invars)
        if scope == "as_written":
            return (True,) * count
        if kind(equation):
            return self._through(equation, outs, scope)
        if equation.primitive.name == "convert_element_type":
            atoms = (*equation.invars, *equation.outvars)
            same = len({atom.aval.dtype for atom in atoms}) == 1
            return outs if same else (False,)
        rule, _ = self._rules.of(equation, scope)
        if rule in ("f32", "as_written"):
            return (True,) * count
        if rule in ("widest", "own"):
            # A comparison returns nothing that could be rounded: it does not care.
            cares = any(map(takes_part, equation.outvars))
            return (sinks(equation, outs) if cares else None,) * count
        return (False,) * count

    def _through(self, equation: Equation, outs: Wants, scope: Rule | None) -> Wants:
        """Return the wants of inputs that go into jaxprs inside."""
        jaxprs = [opened(jaxpr)[0] for jaxpr in inner_jaxprs(equation)]
        if kind(equation) == "cond":
            branches = [self._inputs(jaxpr, outs, scope) for jaxpr in jaxprs]
            return (
                None,
                *(
                    functools.reduce(_both, each)
                    for each in zip(*branches, strict=True)
                ),
            )
        if kind(equation) == "while":
            of_test, of_body = while_counts(equation)
            outs = self.of_body(equation, outs, scope)
            test = self._inputs(jaxprs[0], (None,), scope)
            body = self._inputs(jaxprs[1], outs, scope)
            carry = tuple(map(_both, test[of_test:], body[of_body:]))
            return (*test[:of_test], *body[:of_body], *carry)
        if kind(equation) == "scan":
            outs = self.of_body(equation, outs, scope)
        return self._inputs(jaxprs[0], outs, scope)

    def of_body(self, equation: Equation, outs: Wants, scope: Rule | None) -> Wants:
        """Return the wants of what a loop's body returns.

        Of the carry, which the next turn reads, the greatest fix-point.
        """
        body = opened(inner_jaxprs(equation)[-1])[0]
        if kind(equation) == "scan":
            start, count = scan_counts(equation)
        else:
            start, count = while_counts(equation)[1], len(outs)
        while True:
            read = self._inputs(body, outs, scope)[start : start + count]
            carry = tuple(map(_both, outs[:count], read))
            if carry == outs[:count]:
                return outs
            outs = (*carry, *outs[count:])

    def _inputs(self, jaxpr: Jaxpr, outs: Wants, scope: Rule | None) -> Wants:
        wants = self.within(jaxpr, outs, scope)
        return tuple(map(wants.get, jaxpr.invars))


def _both(a: Want, b: Want) -> Want:
    return b if a is None else a if b is None else a and b
