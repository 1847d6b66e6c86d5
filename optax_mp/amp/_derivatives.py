"""Functions with derivative rules of their own, run by amp together with those rules.

A rule is written for float32, and how a jaxpr holds it differs between versions of JAX.
So we let JAX differentiate the one equation, as it is written, trace that, and
interpret the trace in a new function with a new rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp._jax._control_flow import derivative_rule
from optax_mp._jax._jaxpr import Equation, bind
from optax_mp._tree import is_inexact
from optax_mp.amp._precision import cast

Call = Callable[..., list[Any]]
# interpret(function, arguments, the dtypes that the function is written for)
Interpret = Callable[[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]], Any]


def custom_jvp(
    equation: Equation, call: Call, returned: Sequence[Any], interpret: Interpret
) -> Call:
    """Return `call`, which returns these dtypes, with the rule of a custom_jvp."""
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
        # The tangent of an integer is no float either, and stays as it is.
        moved = [
            cast(tangent, x.dtype if is_inexact(x) else None)
            for tangent, x in zip(moved, outputs, strict=True)
        ]
        return outputs, moved

    return function


def custom_vjp(
    equation: Equation, call: Call, returned: Sequence[Any], interpret: Interpret
) -> Call:
    """Return `call`, which returns these dtypes, with the rule of a custom_vjp."""
    rule = _VjpRule(equation, returned, interpret)
    function = jax.custom_vjp(call)
    # Only symbolic zeros tell which of the values closed over are differentiated.
    symbolic_zeros = _closed_over(equation) > 0
    function.defvjp(rule.forward, rule.backward, symbolic_zeros=symbolic_zeros)
    return function


@dataclass(frozen=True)
class _VjpRule:
    """The rule of a custom_vjp, interpreted.

    Attributes:
        equation: the custom_vjp.
        returned: the dtypes of its outputs.
        interpret: the interpreter.
    """

    equation: Equation
    returned: Sequence[Any]
    interpret: Interpret

    def forward(self, *inputs: Any) -> tuple[Any, Any]:
        equation, (dtypes, floating) = self.equation, _inputs(self.equation)
        pullback: Any = None
        closed_over = _closed_over(equation)
        if any(x.perturbed for x in inputs[:closed_over]):
            raise TypeError(
                "amp: a jax.custom_vjp function closes over a value that is "
                "differentiated, expected one that is an argument, so that the "
                "function's rule has a gradient for it; make it an argument."
            )
        if closed_over:
            inputs = tuple(x.value for x in inputs)

        def vjp(inputs: Sequence[Any]) -> Any:
            nonlocal pullback
            moved = [inputs[i] for i in floating]
            of_floating = _of_floating(equation, floating, inputs)
            outputs, pull = jax.vjp(of_floating, *moved)
            # The function that jax.vjp returns is a pytree: its leaves are arrays, its
            # structure is code.
            residuals, treedef = jax.tree.flatten(pull)
            pullback = _Pullback(treedef, tuple(x.dtype for x in residuals))
            return outputs, residuals

        outputs, residuals = self.interpret(vjp, (list(inputs),), (dtypes,))
        as_given = _Dtypes(tuple(inputs[i].dtype for i in floating))
        return list(map(cast, outputs, self.returned)), (residuals, pullback, as_given)

    def backward(self, saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        residuals, pullback, as_given = saved
        avals = [var.aval for var in self.equation.outvars]
        inexact = [i for i, aval in enumerate(avals) if is_inexact(aval)]

        def pull(residuals: Sequence[Any], moved: Sequence[Any]) -> Any:
            cotangents: list[Any] = [
                np.zeros(aval.shape, jax.dtypes.float0) for aval in avals
            ]
            for i, cotangent in zip(inexact, moved, strict=True):
                cotangents[i] = cotangent
            return list(jax.tree.unflatten(pullback.treedef, residuals)(cotangents))

        moved = [_materialize(cotangents[i]) for i in inexact]
        as_written = (list(pullback.dtypes), [avals[i].dtype for i in inexact])
        pulled = self.interpret(pull, (residuals, moved), as_written)
        dtypes, floating = _inputs(self.equation)
        # None for inputs that are no floats.
        gradients: list[Any] = [None] * len(dtypes)
        for i, gradient, dtype in zip(floating, pulled, as_given.dtypes, strict=True):
            # In the dtype of the input, which may be low: a gradient of another one
            # would be refused.
            gradients[i] = cast(gradient, dtype)
        return tuple(gradients)


def _materialize(cotangent: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    zero: Any = cotangent
    return jnp.zeros(zero.shape, zero.dtype)


def derivative_jaxpr(equation: Equation) -> Any:
    """Return the jaxpr of the rule of a custom_jvp or custom_vjp, as written."""
    _, floating = _inputs(equation)

    def derivative(*inputs: Any) -> Any:
        moved = [inputs[i] for i in floating]
        of_floating = _of_floating(equation, floating, inputs)
        if derivative_rule(equation) == "jvp":
            return jax.jvp(of_floating, moved, moved)
        outputs, pull = jax.vjp(of_floating, *moved)
        return pull(jax.tree.map(_cotangent_like, outputs))

    return jax.make_jaxpr(derivative)(*(atom.aval for atom in equation.invars))


def _cotangent_like(output: jax.Array) -> Any:
    if is_inexact(output):
        return output
    return np.zeros(output.shape, jax.dtypes.float0)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """The code of a pullback, and the dtypes that its residuals have as written."""

    treedef: Any
    dtypes: tuple[Any, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Dtypes:
    """Dtypes that are handed from the forward to the backward pass."""

    dtypes: tuple[Any, ...]


def _inputs(equation: Equation) -> tuple[list[Any], list[int]]:
    """Return the dtypes of the inputs, and which of them can be differentiated."""
    avals = [atom.aval for atom in equation.invars]
    start = _closed_over(equation)
    floating = [i for i, x in enumerate(avals) if i >= start and is_inexact(x)]
    return [x.dtype for x in avals], floating


def _closed_over(equation: Equation) -> int:
    """Return how many inputs, which come first, a custom_vjp closes over.

    Its rule has no gradients for them.
    """
    return equation.params["num_consts"] if derivative_rule(equation) == "vjp" else 0


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
