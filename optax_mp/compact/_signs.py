"""What a function of arrays keeps from being negative, read off its jaxpr."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_mp._jax._jaxpr import AnyJaxpr, inner_jaxprs, is_literal, kind, opened

# Never negative, whatever the inputs are. (NaN is not negative.)
_ALWAYS = {"abs", "square", "exp", "exp2", "logistic", "sqrt", "rsqrt", "iota"}
# Not negative where no input is.
_IF_ALL = {
    "add", "add_any", "broadcast_in_dim", "cbrt", "concatenate",
    "convert_element_type", "copy", "copy_p", "cummax", "cumsum", "div", "dot_general",
    "dynamic_slice", "dynamic_update_slice", "expand_dims", "log1p", "min", "mul",
    "optimization_barrier", "pad", "reduce_max", "reduce_min", "reduce_precision",
    "reduce_sum", "reshape", "reshard", "rev", "sharding_constraint", "sign", "slice",
    "squeeze", "transpose",
}  # fmt: skip
# Not negative where one input is not.
_IF_ONE = {"max"}
_TRANSPARENT = {"jit", "remat", "inline", "custom_jvp", "custom_vjp"}


def nonnegative_outputs(jaxpr: AnyJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs of `jaxpr` are never negative.

    Args:
        jaxpr: of any function.
        inputs: which of its inputs are known not to be negative.

    Returns:
        For each output whether it is known not to be: False may only mean unknown.
    """
    jaxpr, consts = opened(jaxpr)
    given = [*map(_is_nonnegative, consts), *inputs]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def holds(atom: Any) -> bool:
        return _is_nonnegative(atom.val) if is_literal(atom) else known[atom]

    # Of a variable, another of which it is a multiple by something not negative: so
    # c * x * x is known for a square, in whatever order it is written.
    bases: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        inputs = [holds(atom) for atom in equation.invars]
        results = _results(equation, inputs)
        scaled = _multiple_of(equation, inputs)
        if scaled is not None:
            bases[equation.outvars[0]] = bases.get(scaled, scaled)
        if equation.primitive.name == "mul":
            one, two = (
                x if is_literal(x) else bases.get(x, x) for x in equation.invars
            )
            results = [results[0] or one is two]
        for var, result in zip(equation.outvars, results, strict=True):
            known[var] = _is_unsigned(var.aval) or (result and _is_real(var.aval))
    outvars: Any = jaxpr.outvars
    return [holds(atom) for atom in outvars]


def _multiple_of(equation: Any, inputs: list[bool]) -> Any:
    """Return the variable that an equation multiplies by what is not negative."""
    name, atoms = equation.primitive.name, equation.invars
    if not all(_is_real(var.aval) for var in (*atoms, *equation.outvars)):
        return None
    if name == "mul" and any(inputs):
        found = atoms[1] if inputs[0] else atoms[0]
    elif name == "convert_element_type" or (name == "div" and inputs[1]):
        found = atoms[0]
    else:
        return None
    return None if is_literal(found) else found


def _results(equation: Any, inputs: list[bool]) -> list[bool]:
    name, unknown = equation.primitive.name, [False] * len(equation.outvars)
    within = kind(equation)
    if within in _TRANSPARENT:
        # A custom rule has its function first; up to some JAX, constants come apart.
        inner = inner_jaxprs(equation)[0]
        fits = len(opened(inner)[0].invars) == len(inputs)
        return nonnegative_outputs(inner, inputs) if fits else unknown
    if within == "cond":
        branches = [nonnegative_outputs(x, inputs[1:]) for x in inner_jaxprs(equation)]
        return [all(each) for each in zip(*branches, strict=True)]
    if name in ("integer_pow", "select_n", "pow", "clamp"):
        return [_arithmetic(equation, inputs)]
    if name in _ALWAYS or (name in _IF_ONE and any(inputs)):
        return [True] * len(equation.outvars)
    return [name in _IF_ALL and all(inputs)] * len(equation.outvars)


def _arithmetic(equation: Any, inputs: list[bool]) -> bool:
    match equation.primitive.name:
        case "integer_pow":
            return inputs[0] or equation.params["y"] % 2 == 0
        case "select_n":
            return all(inputs[1:])
        case "pow":
            return inputs[0]
        case _:  # clamp: not by its least value alone, for the largest may be less
            return inputs[2] and (inputs[0] or inputs[1])


def _is_unsigned(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (
        dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger)
    )


def _is_real(aval: Any) -> bool:
    # Not an integer, of which a square or a sum wraps around.
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _is_nonnegative(value: Any) -> bool:
    try:
        return bool(np.all(np.asarray(value) >= 0))
    except TypeError:  # no number, such as a random key, or a traced value
        return False
