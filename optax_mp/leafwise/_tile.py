"""Evaluate equations on one tile of the arrays of a leaf, inside a kernel.

A tile is some rows of an array, and of each row some columns: chunk by chunk the
elements, and at once the scales of all of their blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from optax_mp._jax._jaxpr import bind
from optax_mp.leafwise._blocks import MAXIMUM, SPREAD, is_block_operation
from optax_mp.leafwise._program import Node

_LANES = 128


@dataclass(frozen=True)
class Tile:
    """Where a chunk of a tile lies.

    Attributes:
        shape: of the whole array.
        rows: of the chunk.
        columns: of the chunk, a multiple of 128.
        block_size: how many columns share a scale.
        scale_count: how many scales a row of the tile has.
        origin: the indices of the tile's first element in the array.
        first: the chunk's first column in the tile.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    block_size: int
    scale_count: int
    origin: tuple[Any, ...]
    first: Any

    @property
    def _shift(self) -> int:
        # Divisions of signed numbers ask what kind of TPU this is.
        return self.block_size.bit_length() - 1

    def run(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of an elementwise equation for this chunk."""
        equation, aval = node.equation, node.outputs[0].aval
        name = equation.primitive.name
        if is_block_operation(equation):
            take = self._spread if equation.params["name"] == SPREAD else self._reduce
            return [take(equation.params["name"], inputs[0])]
        if not aval.ndim:
            return bind(equation, inputs)
        shape = self._shape_of(aval)
        if name == "broadcast_in_dim":
            return [jnp.full(shape, inputs[0], aval.dtype)]
        if name == "iota":
            return [self._iota(shape, equation.params["dimension"], aval.dtype)]
        if name == "sign":
            return [_sign(inputs[0])]
        if name == "reduce_precision":
            return [_reduce_precision(inputs[0], equation.params)]
        if name == "convert_element_type":
            return [_convert(inputs[0], aval.dtype)]
        if len(inputs) > 1:
            # Mosaic takes no scalars beside arrays.
            inputs = [
                x if jnp.ndim(x) else jnp.full(shape, x, atom.aval.dtype)
                for x, atom in zip(inputs, equation.invars, strict=True)
            ]
        return bind(equation, inputs)

    def is_of_chunk(self) -> jax.Array:
        """Return which scales of the tile are those of this chunk."""
        at = lax.broadcasted_iota(jnp.int32, (self.rows, self.scale_count), 1)
        first = self.first >> self._shift
        return (at >= first) & (at < first + self.columns // self.block_size)

    def _shape_of(self, aval: Any) -> tuple[int, int]:
        is_whole = aval.shape == self.shape
        return self.rows, self.columns if is_whole else self.scale_count

    def _iota(self, shape: tuple[int, int], axis: int, dtype: Any) -> jax.Array:
        """Return the indices of elements along an axis of the whole array."""
        rank = len(self.shape)
        if axis < rank - 2:
            at = jnp.full(shape, self.origin[axis], jnp.int32)
        elif axis == rank - 2:
            at = lax.broadcasted_iota(jnp.int32, shape, 0) + self.origin[axis]
        else:
            at = lax.broadcasted_iota(jnp.int32, shape, 1)
            at = at + (self.origin[axis] + self.first)
        return lax.bitcast_convert_type(at, jnp.uint32) if dtype == jnp.uint32 else at

    def _spread(self, _: str, scales: jax.Array) -> jax.Array:
        at = lax.broadcasted_iota(jnp.int32, (self.rows, self.columns), 1)
        index = (at + self.first) >> self._shift
        return jnp.take_along_axis(scales, index, axis=1)

    def _reduce(self, name: str, values: jax.Array) -> jax.Array:
        """Return the extreme of each block, in the place of its scale in the tile."""
        choose = jnp.maximum if name == MAXIMUM else jnp.minimum
        dtype, values = values.dtype, values.astype(jnp.int32)
        at = self._iota((self.rows, self.columns), len(self.shape) - 1, jnp.int32)
        # The last block is padded with zeros.
        values = jnp.where(at < self.shape[-1], values, 0)
        lane = lax.broadcasted_iota(jnp.int32, (self.rows, self.scale_count), 1)
        result = jnp.zeros((self.rows, self.scale_count), jnp.int32)
        for start in range(0, self.columns, _LANES):
            part = values[:, start : start + _LANES]
            shift = self.block_size // 2
            while shift:
                part = choose(part, pltpu.roll(part, _LANES - shift, 1))
                shift //= 2
            # Each block's extreme is now in the lane of its first column.
            first = (self.first + start) >> self._shift
            index = ((lane - first) << self._shift) & (_LANES - 1)
            found = jnp.take_along_axis(part, index, axis=1)
            count = _LANES // self.block_size
            result = jnp.where((lane >= first) & (lane < first + count), found, result)
        return result.astype(dtype)


def _sign(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x))


def _reduce_precision(x: jax.Array, params: Any) -> jax.Array:
    if (params["exponent_bits"], params["mantissa_bits"]) != (8, 7):
        raise NotImplementedError(f"a kernel rounds to bfloat16 only, not {params}")
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _convert(x: jax.Array, dtype: Any) -> jax.Array:
    """Return `x` in another dtype, in steps that Mosaic knows."""
    if x.dtype == jnp.uint32:  # after a shift: it has no highest bit
        x = lax.bitcast_convert_type(x, jnp.int32)
    if jnp.iinfo(x.dtype).bits < 32 if jnp.issubdtype(x.dtype, jnp.integer) else False:
        x = x.astype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32:
        x = x.astype(jnp.int32)
    return x.astype(dtype)
