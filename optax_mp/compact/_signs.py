"""Which outputs of a function are never negative, read off its jaxpr.

A moment that is never negative needs no bit for its sign, so its codes are finer.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_mp._jax._control_flow import has_regions, wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, is_literal, open_jaxpr
from optax_mp._jax._primitives import KEEPS_SIGN, NEVER_NEGATIVE


def nonnegative_outputs(jaxpr: AnyJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs of `jaxpr` are never negative.

    Args:
        jaxpr: the jaxpr of any function.
        inputs: for each of its inputs whether it is known not to be negative.

    Returns:
        For each output whether it is known not to be negative. False means unknown.
    """
    jaxpr, consts = open_jaxpr(jaxpr)
    given = [*map(_is_nonnegative, consts), *inputs]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def holds(atom: Any) -> bool:
        return _is_nonnegative(atom.val) if is_literal(atom) else known[atom]

    # If a variable is x times a nonnegative factor, this maps it to x. So c * x * x is
    # recognised as a square in whatever order it is written.
    bases: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        claims = [holds(atom) for atom in equation.invars]
        results = _equation_outputs(equation, claims)
        scaled = _scaled_input(equation, claims)
        if scaled is not None:
            bases[equation.outvars[0]] = bases.get(scaled, scaled)
        if equation.primitive.name == "mul":
            left, right = (
                x if is_literal(x) else bases.get(x, x) for x in equation.invars
            )
            results = [results[0] or left is right]
        for var, result in zip(equation.outvars, results, strict=True):
            known[var] = _is_unsigned(var.aval) or (result and _is_real(var.aval))
    outvars: Any = jaxpr.outvars
    return [holds(atom) for atom in outvars]


def _scaled_input(equation: Equation, inputs: list[bool]) -> Any:
    """Return the variable that an equation scales by a nonnegative factor, or None."""
    name, atoms = equation.primitive.name, equation.invars
    if not all(_is_real(var.aval) for var in (*atoms, *equation.outvars)):
        return None
    if name == "mul" and any(inputs):
        scaled = atoms[1] if inputs[0] else atoms[0]
    elif name == "convert_element_type" or (name == "div" and inputs[1]):
        scaled = atoms[0]
    else:
        return None
    return None if is_literal(scaled) else scaled


def _equation_outputs(equation: Equation, inputs: list[bool]) -> list[bool]:
    """Return which outputs of an equation are never negative."""
    if has_regions(equation):
        return (
            wiring_of(equation)
            .forward(inputs, lambda x, given: nonnegative_outputs(x.jaxpr, given), all)
            .outputs
        )
    match equation.primitive.name:
        case "max":
            result = any(inputs)
        case "integer_pow":
            result = inputs[0] or equation.params["y"] % 2 == 0
        case "select_n":
            result = all(inputs[1:])
        case "pow":
            result = inputs[0]
        case "clamp":
            # The lower bound alone does not decide: the upper one may be smaller.
            result = inputs[2] and (inputs[0] or inputs[1])
        case name:
            result = name in NEVER_NEGATIVE or (name in KEEPS_SIGN and all(inputs))
    return [result] * len(equation.outvars)


def _is_unsigned(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (
        dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger)
    )


def _is_real(aval: Any) -> bool:
    # Integers do not count: their squares and sums may wrap around to negative numbers.
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _is_nonnegative(value: Any) -> bool:
    try:
        return bool(np.all(np.asarray(value) >= 0))
    except TypeError:  # not a number, such as a random key, or a traced value
        return False
