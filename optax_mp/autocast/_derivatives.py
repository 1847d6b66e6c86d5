"""Functions with derivative rules (`custom_jvp`, `custom_vjp`): rules run under amp.

A rule is written for float32 and is not in the jaxpr. JAX differentiates the equation
as written; the derivative is traced and runs under amp as the rule of a new function.

A rule may ask which inputs are differentiated, and refuse some. So the new function
asks JAX as well (`symbolic_zeros=True`), and differentiates the equation only with
respect to these inputs, and only for the outputs that have cotangents.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from optax_mp.autocast._lattice import cast
from optax_mp.core._dtypes import is_inexact
from optax_mp.core.jax_api._jaxpr import Equation, bind

Call = Callable[..., list[Any]]
# `interpret(function, arguments, dtypes)` runs `function(*arguments)` under amp. The
# function expects arguments of these dtypes, and the arguments may be low. It returns
# the outputs, and for each one whether it depends on the last argument.
Interpret = Callable[[Callable[..., Any], Any, Any], tuple[Any, Any]]


def custom_jvp(
    equation: Equation, call: Call, cast_outputs: Any, interpret: Interpret
) -> Call:
    """Return `call` with the rule of a custom_jvp, whose outputs are cast."""
    dtypes = [atom.aval.dtype for atom in equation.invars]

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        perturbed = _nonzero(tangents, equation.invars)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            args = [primals[i] for i in perturbed]
            return jax.jvp(_restrict(equation, perturbed, primals), args, tangents)

        values = (list(primals), [tangents[i] for i in perturbed])
        as_written = (dtypes, [dtypes[i] for i in perturbed])
        (outputs, out_tangents), (_, depend) = interpret(jvp, values, as_written)
        outputs = cast_outputs(outputs)
        # `jax.jvp` returns zeros, which later operations would differentiate.
        out_tangents = [
            cast(tangent, x.dtype) if depends else SymbolicZero.from_primal_value(x)
            for tangent, x, depends in zip(out_tangents, outputs, depend, strict=True)
        ]
        return outputs, out_tangents

    function = jax.custom_jvp(call)
    function.defjvp(rule, symbolic_zeros=True)
    return function


def custom_vjp(
    equation: Equation, call: Call, cast_outputs: Any, interpret: Interpret
) -> Call:
    """Return `call` with the rule of a custom_vjp, whose outputs are cast."""
    invars, outvars = equation.invars, equation.outvars
    dtypes = [atom.aval.dtype for atom in invars]

    def forward(*args: Any) -> tuple[Any, Any]:
        perturbed = [
            i for i, x in enumerate(args) if x.perturbed and is_inexact(invars[i].aval)
        ]
        residual_dtypes: list[Any] = []

        def linearize(inputs: Sequence[Any]) -> Any:
            function = _restrict(equation, perturbed, inputs)
            outputs, linear = jax.linearize(function, *(inputs[i] for i in perturbed))
            residual_dtypes[:] = [x.dtype for x in jax.tree.leaves(linear)]
            return outputs, linear

        inputs = [x.value for x in args]
        # The function that jax.linearize returns is a pytree: its leaves are arrays,
        # the residuals, and its structure is code.
        (outputs, linear), _ = interpret(linearize, (inputs,), (dtypes,))
        # A plain number comes as written.
        low_dtypes = [getattr(inputs[i], "dtype", dtypes[i]) for i in perturbed]

        def pull(linear: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
            read = _nonzero(cotangents, outvars)

            def transpose(linear: Any, cotangents: Sequence[Any]) -> Any:
                def read_outputs(*tangents: Any) -> list[Any]:
                    outputs = linear(*tangents)
                    return [outputs[i] for i in read]

                avals = [invars[i].aval for i in perturbed]
                return jax.linear_transpose(read_outputs, *avals)(cotangents)

            values = (linear, [cotangents[i] for i in read])
            as_written = (residual_dtypes, [outvars[i].aval.dtype for i in read])
            pulled, depend = interpret(transpose, values, as_written)
            # None for an input without a gradient. The others must have the dtypes of
            # the inputs, which may be low.
            found = zip(perturbed, pulled, low_dtypes, depend, strict=True)
            gradients = {i: cast(x, dtype) for i, x, dtype, depends in found if depends}
            return tuple(map(gradients.get, range(len(invars))))

        # Also a pytree, so that the rule can save it.
        return cast_outputs(outputs), Partial(pull, linear)

    function = jax.custom_vjp(call)
    function.defvjp(forward, lambda pull, x: pull(x), symbolic_zeros=True)
    return function


def _nonzero(tangents: Sequence[Any], atoms: Sequence[Any]) -> list[int]:
    """Return the indices of (co)tangents that are nonzero and not of integers."""
    return [
        i
        for i, (x, atom) in enumerate(zip(tangents, atoms, strict=True))
        if is_inexact(atom.aval) and not isinstance(x, SymbolicZero)
    ]


def _restrict(
    equation: Equation, indices: Sequence[int], inputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Return the equation as a function of its inputs at these indices."""

    def call(*args: Any) -> list[Any]:
        new = dict(zip(indices, args, strict=True))
        return bind(equation, [new.get(i, x) for i, x in enumerate(inputs)])

    return call
