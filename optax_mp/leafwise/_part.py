"""Evaluate elementwise equations on a part of the arrays of a leaf, inside a kernel."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._jaxpr import bind
from optax_mp.leafwise._blocks import SPREAD, is_block_operation
from optax_mp.leafwise._program import Node


class Part(ABC):
    """A part of a leaf: some elements of arrays of its shape, and their scales."""

    @abstractmethod
    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of an array of elements or of scales."""

    @abstractmethod
    def index(self, axis: int) -> jax.Array:
        """Return the indices of the elements along an axis of the whole array."""

    @abstractmethod
    def spread(self, scales: jax.Array) -> jax.Array:
        """Return for each element the scale of its block."""

    @abstractmethod
    def reduce(self, name: str, values: jax.Array) -> jax.Array:
        """Return the extreme of each block."""

    def run(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of an elementwise equation for this chunk."""
        equation, aval = node.equation, node.outputs[0].aval
        name = equation.primitive.name
        if is_block_operation(equation):
            if equation.params["name"] == SPREAD:
                return [self.spread(inputs[0])]
            return [self.reduce(equation.params["name"], inputs[0])]
        if not aval.ndim:
            return bind(equation, inputs)
        shape = self.shape_of(aval.shape)
        if name == "broadcast_in_dim":
            return [jnp.full(shape, inputs[0], aval.dtype)]
        if name == "iota":
            at = self.index(equation.params["dimension"])
            return [lax.bitcast_convert_type(at, aval.dtype)]
        if name in ("pvary", "pcast"):  # says over which axes of a mesh a value varies
            return list(inputs)
        if name == "round":
            return [_round(inputs[0], equation.params["rounding_method"])]
        if name == "sign":
            return [_sign(inputs[0])]
        if name == "reduce_precision":
            return [_reduce_precision(inputs[0], equation.params)]
        if name == "convert_element_type":
            return [_convert(inputs[0], aval.dtype)]
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
    if x.dtype == jnp.uint32:  # after a shift: it has no highest bit
        x = lax.bitcast_convert_type(x, jnp.int32)
    if jnp.iinfo(x.dtype).bits < 32 if jnp.issubdtype(x.dtype, jnp.integer) else False:
        x = x.astype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32:
        x = x.astype(jnp.int32)
    return x.astype(dtype)
