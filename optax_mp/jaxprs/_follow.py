"""Follow facts of values through a jaxpr, from its inputs to its outputs."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from optax_mp.core.jax_api import _jaxpr

T = TypeVar("T")


def follow(
    jaxpr: _jaxpr.AnyJaxpr,
    inputs: Sequence[T],
    results: Callable[[_jaxpr.Equation, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[T]:
    """Return facts of the outputs of a jaxpr, from facts of its inputs.

    Args:
        jaxpr: the jaxpr.
        inputs: the fact of each input.
        results: returns the facts of the outputs of an equation, from its
            inputs'.
        constant: returns the fact of a literal or a constant, from its value.
    """
    jaxpr, consts = _jaxpr.open_jaxpr(jaxpr)
    facts = dict(zip(jaxpr.invars, inputs, strict=True))
    facts.update(zip(jaxpr.constvars, map(constant, consts), strict=True))

    def read(atom: Any) -> T:
        return constant(atom.val) if _jaxpr.is_literal(atom) else facts[atom]

    for equation in jaxpr.eqns:
        outputs = results(equation, list(map(read, equation.invars)))
        facts.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))
