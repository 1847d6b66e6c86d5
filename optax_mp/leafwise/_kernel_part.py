"""Elementwise equations inside kernels, where some operations do not exist."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._jaxpr import bind
from optax_mp.leafwise._part import Part


class KernelPart(Part):
    """A part of a piece that a kernel computes at once."""

    def bind(
        self, equation: Any, inputs: Sequence[Any], shape: tuple[int, ...]
    ) -> list[Any]:
        """Return the outputs of an equation, by operations that kernels know."""
        name, first = equation.primitive.name, inputs[0]
        if name == "round":
            return [_round(first, equation.params["rounding_method"])]
        if name == "sign":
            return [_sign(first)]
        if name == "reduce_precision":
            return [_reduce_precision(first, equation.params)]
        if name == "convert_element_type":
            return [_convert(first, equation.outvars[0].aval.dtype)]
        if len(inputs) > 1:
            # Kernels take no scalars beside arrays.
            inputs = [
                x if jnp.ndim(x) else jnp.full(shape, x, atom.aval.dtype)
                for x, atom in zip(inputs, equation.invars, strict=True)
            ]
        return bind(equation, inputs)


def _sign(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x))


def _round(x: jax.Array, method: Any) -> jax.Array:
    """Round to whole numbers, which Triton has no operation for."""
    if method != lax.RoundingMethod.TO_NEAREST_EVEN:
        return jnp.where(x < 0, -jnp.floor(0.5 - x), jnp.floor(x + 0.5))
    below = jnp.floor(x)
    rest = x - below
    is_odd = below - 2 * jnp.floor(below * 0.5) == 1
    return jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), below + 1, below)


def _reduce_precision(x: jax.Array, params: Any) -> jax.Array:
    if (params["exponent_bits"], params["mantissa_bits"]) != (8, 7):
        raise NotImplementedError(f"a kernel rounds to bfloat16 only, not {params}")
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _convert(x: jax.Array, dtype: Any) -> jax.Array:
    """Return `x` in another dtype, in steps that kernels know."""
    if x.dtype == jnp.uint32 and jnp.issubdtype(dtype, jnp.floating):
        # By halves, as signed numbers: only the sum is rounded.
        low = lax.bitcast_convert_type(x & 0xFFFF, jnp.int32).astype(jnp.float32)
        high = lax.bitcast_convert_type(x >> 16, jnp.int32).astype(jnp.float32)
        return (high * 65536 + low).astype(dtype)
    if _is_narrow_integer(x.dtype) or _is_narrow_integer(dtype):
        x = x.astype(jnp.int32)
    return x.astype(dtype)


def _is_narrow_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize < 4
