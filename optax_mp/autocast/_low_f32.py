"""Matrix products of 16-bit operands with float32 results: the rule `"low_f32"`.

JAX's own derivative would multiply a float32 gradient with a 16-bit operand, and round
the product. Here the incoming gradient is rounded to 16 bits, so both products of the
backward pass also have 16-bit operands and float32 results.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from optax_mp._jax._jaxpr import Equation, bind, evaluate, trace_jaxpr, with_dtype
from optax_mp._jax._primitives import is_product


def product(equation: Equation, operands: Sequence[Any], low: Any) -> jax.Array:
    """Return a matrix product of these operands, rounded to the dtype `low`."""
    result_dtype = equation.outvars[0].aval.dtype

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        return _to_float32(equation, [left, right])[0].astype(result_dtype)

    def forward(left: Any, right: Any) -> Any:
        rounded = [x.value.astype(low) for x in (left, right)]
        # The gradient of one operand needs the other; nothing else is kept.
        needed = [rounded[1] if left.perturbed else None]
        needed += [rounded[0] if right.perturbed else None]
        return multiply(*rounded), needed

    def backward(others: Any, cotangent: Any) -> tuple[Any, ...]:
        if isinstance(cotangent, SymbolicZero):
            return None, None
        rounded = cotangent.astype(low)
        return tuple(
            None if other is None else _gradient(equation, i, rounded, other).astype(x)
            for i, (x, other) in enumerate(zip(dtypes, others, strict=True))
        )

    @jax.custom_vjp
    def low_product(left: jax.Array, right: jax.Array) -> jax.Array:
        return multiply(left.astype(low), right.astype(low))

    dtypes = [x.dtype for x in operands]
    low_product.defvjp(forward, backward, symbolic_zeros=True)
    return low_product(*operands)


def _gradient(equation: Equation, i: int, cotangent: Any, other: Any) -> jax.Array:
    """Return the gradient of operand `i`: a product of a cotangent and the other."""
    # Transposed in float32. The products that this gives then take 16-bit operands.
    avals = [with_dtype(x.aval, jnp.float32) for x in equation.invars]
    out = with_dtype(equation.outvars[0].aval, jnp.float32)
    params = equation.params | {"preferred_element_type": None}

    def pull(cotangent: Any, other: Any) -> Any:
        def of_operand(x: Any) -> Any:
            operands = (x, other) if i == 0 else (other, x)
            return bind(equation, operands, params)[0]

        return jax.linear_transpose(of_operand, avals[i])(cotangent)[0]

    jaxpr = trace_jaxpr(pull, [out, avals[1 - i]])
    return evaluate(jaxpr, [cotangent, other], _to_float32)[0]


def _to_float32(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation; a product returns float32."""
    params = equation.params
    if is_product(equation):
        params = params | {"preferred_element_type": jnp.dtype(jnp.float32)}
    return bind(equation, inputs, params)
