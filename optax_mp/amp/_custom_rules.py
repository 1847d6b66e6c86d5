"""Functions with derivative rules of their own, run by amp together with those rules.

How a rule is kept in a jaxpr differs between versions of JAX, and it is written for
float32. So JAX itself is asked for the derivative of the one equation, as it is
written; the trace of that is interpreted, in a new function with a new rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp._jax._jaxpr import Equation, bind, kind
from optax_mp._tree import is_inexact
from optax_mp.amp._cast import cast

Call = Callable[..., list[Any]]
# interpret(function, arguments, the dtypes that the function is written for)
Interpret = Callable[[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]], Any]


def custom_jvp(
    equation: Equation, call: Call, returned: Sequence[Any], interpret: Interpret
) -> Call:
    """Return `call`, that returns these dtypes, with the rule of a custom_jvp."""
    dtypes, floating = _inputs(equation)
    function = jax.custom_jvp(call)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moved = [primals[i] for i in floating]
        return jax.jvp(_of_floating(equation, floating, primals), moved, tangents)

    @function.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        given = (list(primals), [tangents[i] for i in floating])
        as_written = (dtypes, [dtypes[i] for i in floating])
        outputs, moved = interpret(jvp, given, as_written)
        outputs = list(map(cast, outputs, returned))
        # Of what is no float, the tangent is none either, and stays as it is.
        moved = [
            cast(tangent, x.dtype if is_inexact(x) else None)
            for tangent, x in zip(moved, outputs, strict=True)
        ]
        return outputs, moved

    return function


def custom_vjp(
    equation: Equation, call: Call, returned: Sequence[Any], interpret: Interpret
) -> Call:
    """Return `call`, that returns these dtypes, with the rule of a custom_vjp."""
    dtypes, floating = _inputs(equation)
    closed_over = _closed_over(equation)
    outputs_written = [var.aval for var in equation.outvars]
    inexact = [i for i, aval in enumerate(outputs_written) if is_inexact(aval)]
    function = jax.custom_vjp(call)

    def forward(*inputs: Any) -> tuple[Any, Any]:
        pullback: Any = None
        if any(x.perturbed for x in inputs[:closed_over]):
            raise TypeError(
                "amp: a jax.custom_vjp function closes over a value by which it is "
                "differentiated, expected one that its rule knows; make it an argument."
            )
        if closed_over:
            inputs = tuple(x.value for x in inputs)

        def vjp(inputs: Sequence[Any]) -> Any:
            nonlocal pullback
            moved = [inputs[i] for i in floating]
            of_floating = _of_floating(equation, floating, inputs)
            outputs, pull = jax.vjp(of_floating, *moved)
            # What jax.vjp returns is a pytree: of arrays, and the code around them.
            kept, treedef = jax.tree.flatten(pull)
            pullback = _Pullback(treedef, tuple(x.dtype for x in kept))
            return outputs, kept

        outputs, kept = interpret(vjp, (list(inputs),), (dtypes,))
        as_given = _Dtypes(tuple(inputs[i].dtype for i in floating))
        return list(map(cast, outputs, returned)), (kept, pullback, as_given)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        kept, pullback, as_given = residuals

        def pull(kept: Sequence[Any], moved: Sequence[Any]) -> Any:
            cotangents: list[Any] = [
                np.zeros(aval.shape, jax.dtypes.float0) for aval in outputs_written
            ]
            for i, cotangent in zip(inexact, moved, strict=True):
                cotangents[i] = cotangent
            return list(jax.tree.unflatten(pullback.treedef, kept)(cotangents))

        moved = [_materialized(cotangents[i]) for i in inexact]
        as_written = (list(pullback.kept), [outputs_written[i].dtype for i in inexact])
        pulled = interpret(pull, (kept, moved), as_written)
        # None for inputs that are no floats.
        gradients: list[Any] = [None] * len(dtypes)
        for i, gradient, dtype in zip(floating, pulled, as_given.dtypes, strict=True):
            gradients[i] = cast(gradient, dtype)
        return tuple(gradients)

    # That the values in question are told from others needs symbolic zeros.
    function.defvjp(forward, backward, symbolic_zeros=closed_over > 0)
    return function


def _materialized(cotangent: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    zero: Any = cotangent
    return jnp.zeros(zero.shape, zero.dtype)


def derivative_of(equation: Equation) -> Any:
    """Return the jaxpr of the rule of a custom_jvp or custom_vjp, at its own types."""
    _, floating = _inputs(equation)

    def derivative(*inputs: Any) -> Any:
        moved = [inputs[i] for i in floating]
        of_floating = _of_floating(equation, floating, inputs)
        if kind(equation) == "custom_jvp":
            return jax.jvp(of_floating, moved, moved)
        outputs, pull = jax.vjp(of_floating, *moved)
        return pull(jax.tree.map(_cotangent, outputs))

    return jax.make_jaxpr(derivative)(*(atom.aval for atom in equation.invars))


def _cotangent(output: jax.Array) -> Any:
    if is_inexact(output):
        return output
    return np.zeros(output.shape, jax.dtypes.float0)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """What a pullback is but for the arrays it keeps, and the dtypes of those."""

    treedef: Any
    kept: tuple[Any, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Dtypes:
    dtypes: tuple[Any, ...]


def _inputs(equation: Equation) -> tuple[list[Any], list[int]]:
    """Return the dtypes of the inputs, and which of them can be differentiated."""
    avals = [atom.aval for atom in equation.invars]
    start = _closed_over(equation)
    floating = [i for i, x in enumerate(avals) if i >= start and is_inexact(x)]
    return [x.dtype for x in avals], floating


def _closed_over(equation: Equation) -> int:
    """Return how many inputs, the first, a custom_vjp closes over.

    Its rule has no gradients for them.
    """
    return equation.params["num_consts"] if kind(equation) == "custom_vjp" else 0


def _of_floating(
    equation: Equation, floating: Sequence[int], inputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Return the equation as a function of those inputs that can be differentiated."""

    def call(*moved: Any) -> list[Any]:
        filled = list(inputs)
        for i, x in zip(floating, moved, strict=True):
            filled[i] = x
        return bind(equation, filled)

    return call
