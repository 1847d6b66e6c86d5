"""Rules that are functions: calling them, and checking what they return."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from optax_mp._jax._jaxpr import Equation, bind, is_literal, trace_jaxpr, with_dtype
from optax_mp._tree import describe, is_array, is_floating
from optax_mp.autocast._lattice import FULL, LOW, Precision, Precisions, takes_part


def bind_by_function(
    rule: Callable[..., Any],
    compute_dtype: Any,
    equation: Equation,
    inputs: Sequence[Any],
) -> list[Any]:
    """Return the outputs of an equation, bound as a user's function says."""
    originals = tuple(atom.aval.dtype for atom in equation.invars)
    # A rule may ask each input for its dtype, but a literal is a plain number.
    given = [
        jnp.asarray(x, atom.aval.dtype) if is_literal(atom) else x
        for x, atom in zip(inputs, equation.invars, strict=True)
    ]
    returned = rule(compute_dtype, originals, *given, **equation.params)
    invars, params = _check(equation.primitive.name, returned, given)
    return bind(equation, invars, params)


def _check(name: str, returned: Any, given: Sequence[Any]) -> tuple[Any, Any]:
    """Return what a rule returned, if the primitive may be bound with it."""
    match returned:
        case (tuple() | list() as invars, dict() as params):
            pass
        case _:
            raise TypeError(
                f"amp: the rule of {name} returned {returned!r}, expected a pair of a "
                "list and a dictionary; return (invars, bind_params)."
            )
    if len(invars) != len(given) or not all(map(_may_replace, invars, given)):
        raise ValueError(
            f"amp: the rule of {name} returned {', '.join(map(describe, invars))} as "
            f"inputs, expected {', '.join(map(describe, given))}; change nothing but "
            "their floating dtypes."
        )
    return invars, params


def _may_replace(new: Any, old: Any) -> bool:
    if not is_array(new) or new.shape != old.shape:
        return False
    return new.dtype == old.dtype or (is_floating(new) and is_floating(old))


def precisions_by_function(
    rule: Callable[..., Any],
    compute_dtype: Any,
    equation: Equation,
    precisions: Precisions,
) -> Precisions:
    """Return the precisions of the outputs of an equation that a function binds."""
    avals = [
        with_dtype(atom.aval, compute_dtype) if precision == LOW else atom.aval
        for atom, precision in zip(equation.invars, precisions, strict=True)
    ]

    def run(*inputs: Any) -> list[Any]:
        return bind_by_function(rule, compute_dtype, equation, inputs)

    # The only way to know what a user's function does is to call it.
    outputs = trace_jaxpr(run, avals).out_avals
    return tuple(
        _precision(equation, atom, aval.dtype, compute_dtype)
        for atom, aval in zip(equation.outvars, outputs, strict=True)
    )


def _precision(
    equation: Equation, atom: Any, dtype: Any, compute_dtype: Any
) -> Precision:
    if dtype == atom.aval.dtype:
        return FULL if takes_part(atom) else None
    if takes_part(atom) and dtype == compute_dtype:
        return LOW
    expected = {jnp.dtype(atom.aval.dtype).name, jnp.dtype(compute_dtype).name}
    raise ValueError(
        f"amp: {equation.primitive.name} returns {jnp.dtype(dtype).name} by its rule, "
        f"expected {' or '.join(sorted(expected))}; set `preferred_element_type` among "
        "the bind_params, or cast the inputs to one of them."
    )
