"""Rules that are functions: calling them, and checking what they return."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from optax_mp._jax._jaxpr import Equation, bind, is_literal, trace_jaxpr, with_dtype
from optax_mp._tree import describe, is_array, is_floating
from optax_mp.amp._lattice import FULL, LOW, Precision, Precisions, takes_part


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
    name = equation.primitive.name
    returned = rule(compute_dtype, originals, *given, **equation.params)
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise TypeError(
            f"amp: the rule of {name} returned {returned!r}, expected a pair; return "
            "(invars, bind_params)."
        )
    invars, params = returned
    _check_params(name, params)
    _check_inputs(name, invars, given)
    return bind(equation, invars, params)


def _check_params(name: str, params: Any) -> None:
    if not isinstance(params, dict):
        raise TypeError(
            f"amp: the rule of {name} returned {params!r} as bind_params, expected a "
            "dictionary; return the one that it was given, or a changed copy."
        )


def _check_inputs(name: str, invars: Any, given: Sequence[Any]) -> None:
    if not isinstance(invars, tuple | list) or len(invars) != len(given):
        count = len(invars) if isinstance(invars, tuple | list) else repr(invars)
        raise ValueError(
            f"amp: the rule of {name} returned {count} inputs, expected {len(given)}; "
            "return as many as it was given."
        )
    for i, (new, old) in enumerate(zip(invars, given, strict=True)):
        if not is_array(new) or not _may_replace(new, old):
            fix = "change nothing but its floating dtype"
            raise ValueError(
                f"amp: the rule of {name} returned {describe(new)} as input {i}, "
                f"expected {describe(old)}; "
                f"{fix if is_floating(old) else 'return it as it was given'}."
            )


def _may_replace(new: Any, old: Any) -> bool:
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (new, old))
    return new.shape == old.shape and (floating or new.dtype == old.dtype)


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
