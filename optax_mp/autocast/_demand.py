"""What a value's readers want: if all compute in float32, the value stays float32.

In a softmax, an `exp` reads a difference and runs in float32. Rounding the difference
to 16 bits would save nothing. Wants are found backwards, from the outputs of a jaxpr to
its inputs, before any precision is chosen. They do not leave the jaxpr: a loop, a
branch or a `jit` counts as a reader in 16 bits, and the readers of a jaxpr's outputs
are unknown.
"""

from collections.abc import Sequence
from typing import Any

from optax_mp.autocast._lattice import takes_part
from optax_mp.autocast._rules import Rule, Rules
from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._extend import Jaxpr

# True if all readers of a value compute in float32; None if no reader cares.
Want = bool | None


def is_better_full(equation: _jaxpr.Equation, wants: Sequence[Want]) -> bool:
    """Return whether an operation should run in float32, because of its readers."""
    name = equation.primitive.name
    if name == "add_any":
        # It sums the gradients of two uses, perhaps of a weight: in float32, unless
        # something reads the sum in 16 bits.
        return False not in wants
    # A select_n rounds nothing, and its derivative would keep zeros in float32.
    return True in wants and False not in wants and name != "select_n"


def wants_of(jaxpr: Jaxpr, rules: Rules, scope_rule: Rule | None) -> dict[Any, Want]:
    """Return what readers want of each variable; those without a want are left out.

    Args:
        jaxpr: the jaxpr.
        rules: the rules of its equations.
        scope_rule: the rule of the scopes around it.
    """
    ruled = []
    full: set[int] = set()  # the results of float32 operations
    for equation in jaxpr.eqns:
        scope = rules.scope_rule_of(equation, scope_rule)
        rule, _ = rules.rule_of(equation, scope)
        reads_full = not full.isdisjoint(map(id, equation.invars))
        if rule == "f32" or (rule == "widest" and reads_full):
            full.update(map(id, equation.outvars))
        # A difference from a float32 value, as in a log-softmax, is computed in
        # float32, so rounding the other value would save nothing.
        is_full = reads_full and equation.primitive.name == "sub"
        ruled.append((equation, "f32" if is_full else rule))
    wants: dict[Any, Want] = {}
    for equation, rule in reversed(ruled):
        outs = tuple(map(wants.get, equation.outvars))
        want = _want_of_inputs(equation, rule, outs)
        for atom in equation.invars if want is not None else ():
            if not _jaxpr.is_literal(atom):
                wants[atom] = want and wants.get(atom, True)
    return wants


def _want_of_inputs(
    equation: _jaxpr.Equation, rule: Rule, outs: Sequence[Want]
) -> Want:
    """Return what an equation wants of its inputs, from the wants of its outputs."""
    if rule == "cast":
        (read,), (made,) = equation.invars, equation.outvars
        return outs[0] if read.aval.dtype == made.aval.dtype else False
    if rule in ("widest", "own"):
        # A comparison does not care: its result is not a float, so never rounded.
        cares = any(map(takes_part, equation.outvars))
        return is_better_full(equation, outs) if cares else None
    return rule in ("f32", "as_written")
