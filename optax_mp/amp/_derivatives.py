"""Functions with derivative rules of their own: amp runs the rules as well.

A rule is written for float32, and each version of JAX keeps it in another place of the
jaxpr. So we let JAX differentiate the equation as it is written, trace that, and run
the trace under amp, as the rule of a new function.
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
# `interpret(function, arguments, dtypes)` runs `function(*arguments)` under amp. The
# function expects arguments of these dtypes; those that are given may be low.
Interpret = Callable[[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]], Any]


def custom_jvp(
    equation: Equation, call: Call, output_dtypes: Sequence[Any], interpret: Interpret
) -> Call:
    """Return `call` with the rule of a custom_jvp; its outputs have these dtypes."""
    dtypes, differentiable = _inputs(equation)
    function = jax.custom_jvp(call)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        args = [primals[i] for i in differentiable]
        return jax.jvp(_restrict(equation, differentiable, primals), args, tangents)

    @function.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        given = (list(primals), [tangents[i] for i in differentiable])
        as_written = (dtypes, [dtypes[i] for i in differentiable])
        outputs, out_tangents = interpret(jvp, given, as_written)
        outputs = list(map(cast, outputs, output_dtypes))
        # The tangent of an integer is not a float either, and stays as it is.
        out_tangents = [
            cast(tangent, x.dtype if is_inexact(x) else None)
            for tangent, x in zip(out_tangents, outputs, strict=True)
        ]
        return outputs, out_tangents

    return function


def custom_vjp(
    equation: Equation, call: Call, output_dtypes: Sequence[Any], interpret: Interpret
) -> Call:
    """Return `call` with the rule of a custom_vjp; its outputs have these dtypes."""
    rule = _VjpRule(equation, output_dtypes, interpret)
    function = jax.custom_vjp(call)
    # With symbolic zeros JAX says which of the values closed over are differentiated.
    symbolic_zeros = _closed_over(equation) > 0
    function.defvjp(rule.forward, rule.backward, symbolic_zeros=symbolic_zeros)
    return function


@dataclass(frozen=True)
class _VjpRule:
    """The rule of a custom_vjp, interpreted.

    Attributes:
        equation: the custom_vjp.
        output_dtypes: the dtypes of its outputs under amp.
        interpret: the interpreter.
    """

    equation: Equation
    output_dtypes: Sequence[Any]
    interpret: Interpret

    def forward(self, *inputs: Any) -> tuple[Any, Any]:
        equation, (dtypes, differentiable) = self.equation, _inputs(self.equation)
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
            args = [inputs[i] for i in differentiable]
            function = _restrict(equation, differentiable, inputs)
            outputs, pull = jax.vjp(function, *args)
            # The function that jax.vjp returns is a pytree: its leaves are arrays, and
            # its structure is code.
            residuals, treedef = jax.tree.flatten(pull)
            pullback = _Pullback(treedef, tuple(x.dtype for x in residuals))
            return outputs, residuals

        outputs, residuals = self.interpret(vjp, (list(inputs),), (dtypes,))
        as_given = _Dtypes(tuple(inputs[i].dtype for i in differentiable))
        saved = (residuals, pullback, as_given)
        return list(map(cast, outputs, self.output_dtypes)), saved

    def backward(self, saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        residuals, pullback, as_given = saved
        avals = [var.aval for var in self.equation.outvars]
        inexact = [i for i, aval in enumerate(avals) if is_inexact(aval)]

        def pull(residuals: Sequence[Any], given: Sequence[Any]) -> Any:
            filled: list[Any] = [
                np.zeros(aval.shape, jax.dtypes.float0) for aval in avals
            ]
            for i, cotangent in zip(inexact, given, strict=True):
                filled[i] = cotangent
            return list(jax.tree.unflatten(pullback.treedef, residuals)(filled))

        given = [_materialize(cotangents[i]) for i in inexact]
        as_written = (list(pullback.dtypes), [avals[i].dtype for i in inexact])
        pulled = self.interpret(pull, (residuals, given), as_written)
        dtypes, differentiable = _inputs(self.equation)
        # None for inputs that are not differentiable.
        gradients: list[Any] = [None] * len(dtypes)
        for i, gradient, dtype in zip(
            differentiable, pulled, as_given.dtypes, strict=True
        ):
            # JAX wants gradients in the dtypes of the inputs, which may be low.
            gradients[i] = cast(gradient, dtype)
        return tuple(gradients)


def _materialize(cotangent: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    zero: Any = cotangent
    return jnp.zeros(zero.shape, zero.dtype)


def derivative_jaxpr(equation: Equation) -> Any:
    """Return the jaxpr of the rule of a custom_jvp or custom_vjp, as written."""
    _, differentiable = _inputs(equation)

    def derivative(*inputs: Any) -> Any:
        args = [inputs[i] for i in differentiable]
        function = _restrict(equation, differentiable, inputs)
        if derivative_rule(equation) == "jvp":
            return jax.jvp(function, args, args)
        outputs, pull = jax.vjp(function, *args)
        return pull(jax.tree.map(_cotangent_like, outputs))

    return jax.make_jaxpr(derivative)(*(atom.aval for atom in equation.invars))


def _cotangent_like(output: jax.Array) -> Any:
    if is_inexact(output):
        return output
    return np.zeros(output.shape, jax.dtypes.float0)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """The structure of a pullback, and the dtypes of its residuals as written."""

    treedef: Any
    dtypes: tuple[Any, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Dtypes:
    """Dtypes that are handed from the forward to the backward pass."""

    dtypes: tuple[Any, ...]


def _inputs(equation: Equation) -> tuple[list[Any], list[int]]:
    """Return the dtypes of the inputs, and the indices of the differentiable ones."""
    avals = [atom.aval for atom in equation.invars]
    start = _closed_over(equation)
    differentiable = [i for i, x in enumerate(avals) if i >= start and is_inexact(x)]
    return [x.dtype for x in avals], differentiable


def _closed_over(equation: Equation) -> int:
    """Return how many inputs, which come first, a custom_vjp closes over.

    Its rule has no gradients for them.
    """
    return equation.params["num_consts"] if derivative_rule(equation) == "vjp" else 0


def _restrict(
    equation: Equation, differentiable: Sequence[int], inputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Return the equation as a function of its differentiable inputs alone."""

    def call(*args: Any) -> list[Any]:
        filled = list(inputs)
        for i, x in zip(differentiable, args, strict=True):
            filled[i] = x
        return bind(equation, filled)

    return call
