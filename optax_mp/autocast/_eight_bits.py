"""Matrix products of 8-bit operands, and of 16-bit ones with float32 results.

Each operand is multiplied by a power of two that brings its largest magnitude near the
largest value of its 8-bit dtype, and rounded. A multiplication by a power of two is
exact, so that rounding is the only error. Overflows happen in float32, where a loss
scale sees them. There is no state: the scale comes from the current values.

For the backward pass JAX keeps the 8 bits of an operand. Incoming gradients are rounded
to float8_e5m2, which has a wider range, and multiplied with them. There is no forward
mode, and no second derivative.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from optax_mp._jax._jaxpr import Equation, bind, evaluate, trace_jaxpr, with_dtype
from optax_mp._jax._primitives import is_product, matrix_sizes

# The two of the Open Compute Project, which hardware multiplies.
DTYPES = E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
_F32 = jnp.dtype(jnp.float32)
# The product that has an 8-bit form. Convolutions have none: their gradients have
# operands of two dtypes, which JAX does not convolve.
PRIMITIVE = "dot_general"
# Scaling and rounding take time in proportion to the operands, and save time in
# proportion to their product. On an H100, at its peak rates, these are equal between
# widths of 256 and 1024 (docs/design/log.md). GPUs need multiples of 16.
SMALLEST, MULTIPLE = 512, 16
# The bits of a float32 that hold the exponent, and its smallest normal number.
_EXPONENT, _SMALLEST_NORMAL = 0x7F800000, 0x00800000


class Rounded(NamedTuple):
    """An array in 8 bits.

    Attributes:
        values: the 8-bit floats.
        unit: what they are multiples of: a float32 scalar, a power of two.
    """

    values: Any
    unit: Any


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: jax.Array, dtype: Any) -> Rounded:
    """Return `x` in an 8-bit dtype, scaled by its largest finite magnitude.

    Infinity and NaN stay, but infinity becomes NaN if the dtype has none.
    """
    # The largest and the smallest power of two whose inverse is also a normal number.
    ratio = float(jnp.finfo(dtype).max) / _largest_finite(x)
    ratio = jnp.clip(ratio, 2.0**-126, 2.0**126)
    exponent = lax.bitcast_convert_type(ratio, jnp.int32) & _EXPONENT
    scale = lax.bitcast_convert_type(exponent, jnp.float32)
    return Rounded((x.astype(jnp.float32) * scale).astype(dtype), 1 / scale)


def _largest_finite(x: jax.Array) -> jax.Array:
    """Return the largest finite magnitude in `x`, or 0, in float32."""
    # As integers, the bits of magnitudes have the order of the magnitudes. If the
    # smallest normal number is added, infinity and NaN wrap to below zero. XLA reads
    # `x` once for this chain. It may write a mask of finite values to memory, if the
    # product reads `x` transposed.
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    wrapped = jnp.max(bits + _SMALLEST_NORMAL)
    bits = jnp.maximum(wrapped, _SMALLEST_NORMAL) - _SMALLEST_NORMAL
    return lax.bitcast_convert_type(bits, jnp.float32)


@round_to.defjvp
def _refuse(*_: Any) -> Any:
    # `product` has its own derivative, so only a second one comes here. Rounded
    # tangents have different units, so they cannot be added.
    raise NotImplementedError(
        "amp: expected one derivative of a function with 8-bit products, got a second, "
        "which needs their operands in 16 bits; leave these products in 16 bits, by "
        "compute_dtype=jnp.bfloat16 or by the rule 'not_f8' for their scope."
    )


def fits(equation: Equation) -> bool:
    """Return whether the shapes of a product are such that 8 bits pay."""
    # An empty batch, as of an expert without tokens, has no largest value.
    return 0 not in equation.outvars[0].aval.shape and all(
        isinstance(size, int) and size >= SMALLEST and size % MULTIPLE == 0
        for size in matrix_sizes(equation)
    )


def describe_unused(dtype: Any, small: int) -> str:
    """Say that no product runs in 8 bits, `small` of them because of their shapes."""
    return (
        f"expected matrix products in {dtype.name}, as `compute_dtype` says, got none "
        f"({small} because of their shapes), so all run in bfloat16; pass arrays with "
        f"{SMALLEST} rows, columns and contracted entries or more, in multiples of "
        f"{MULTIPLE} and outside of amp_stop, or compute_dtype=jnp.bfloat16."
    )


def product(
    equation: Equation, operands: Sequence[Any], dtype: Any, out_dtype: Any
) -> jax.Array:
    """Return a matrix product of operands in 8 bits.

    Args:
        equation: the product.
        operands: its operands.
        dtype: the 8-bit dtype for them; gradients are rounded to float8_e5m2. Or one of
            16 bits, also for gradients.
        out_dtype: the dtype of the result.
    """
    # A policy of `jax.checkpoint` may keep the sums, so they are no wider than the
    # result. They are not scaled yet: bfloat16 has the range for them, float16 has not.
    sum_dtype = out_dtype if out_dtype == jnp.bfloat16 else _F32
    dtypes = [x.dtype for x in operands]

    def rounded(x: jax.Array, in_8_bits: Any = dtype) -> Rounded:
        if dtype in DTYPES:
            return round_to(x, in_8_bits)
        return Rounded(x.astype(dtype), np.float32(1))  # XLA drops a product with 1

    def multiply(left: Rounded, right: Rounded) -> jax.Array:
        dot = functools.partial(_bind_to, sum_dtype, equation)
        return _multiply(dot, left, right).astype(out_dtype)

    def forward(left: Any, right: Any) -> Any:
        factors = [rounded(x.value) for x in (left, right)]
        # The gradient of one operand needs the other; nothing else is kept.
        needed = [factors[1] if left.perturbed else None]
        needed += [factors[0] if right.perturbed else None]
        return multiply(*factors), needed

    def backward(others: Any, cotangent: Any) -> tuple[Any, ...]:
        if isinstance(cotangent, SymbolicZero):
            return None, None
        gradient = rounded(cotangent, E5M2)
        return tuple(
            None
            if other is None
            else _multiply(_pullback(equation, i), gradient, other).astype(dtypes[i])
            for i, other in enumerate(others)
        )

    @jax.custom_vjp
    def multiply_rounded(left: Any, right: Any) -> Any:
        return multiply(rounded(left), rounded(right))

    multiply_rounded.defvjp(forward, backward, symbolic_zeros=True)
    return multiply_rounded(*operands)


def _pullback(equation: Equation, i: int) -> Callable[..., Any]:
    """Return the product of a cotangent and the other operand: the gradient of `i`."""
    avals = [with_dtype(x.aval, jnp.float32) for x in equation.invars]
    out = with_dtype(equation.outvars[0].aval, jnp.float32)
    params = equation.params | {"preferred_element_type": None}

    def pull(cotangent: Any, other: Any) -> Any:
        def of_operand(x: Any) -> Any:
            operands = (x, other) if i == 0 else (other, x)
            return bind(equation, operands, params)[0]

        return jax.linear_transpose(of_operand, avals[i])(cotangent)[0]

    jaxpr = trace_jaxpr(pull, [out, avals[1 - i]])
    run = functools.partial(_bind_to, _F32)
    return lambda inputs: evaluate(jaxpr, inputs, run)


def _bind_to(dtype: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation; a product of 8-bit floats returns `dtype`."""
    # Casts to 16 bits before the product would hide the 8 bits from XLA.
    params = equation.params
    if is_product(equation):
        params = params | {"preferred_element_type": dtype}
    return bind(equation, inputs, params)


def _multiply(multiply: Callable[..., Any], left: Rounded, right: Rounded) -> jax.Array:
    """Return the product of two rounded arrays, by a product of 8-bit floats."""
    (values,) = multiply([left.values, right.values])
    return values * (left.unit * right.unit).astype(values.dtype)
