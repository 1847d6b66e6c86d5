"""Part of a leaf in a TPU's kernel: a tile of rows and columns."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from optax_mp.leafwise._kernel_evaluator import KernelEvaluator

# How blocks are reduced. A register of a TPU is 8 rows of 128 lanes, and 32 of
# its lanes are a block. Mosaic has no reduction over a part of the lanes, and
# no reshape that would make blocks an axis. But lanes can be rotated:
#
#     lanes      0     1     2     3     4 ...      of a block of four
#     part       a     b     c     d     e ...
#     by two     ac    bd    ce    df    ...        chosen with lane + 2
#     by one     abcd  bcde  cdef  ...              chosen with lane + 1
#
# After log2(block size) rotations the first lane of each block has the extreme
# of its block; the other lanes have extremes across blocks, which are not used.
# The scales of the tile are another array, with one lane for each block: lane k
# of it takes the value in lane k * block size of `part`. A gather along lanes
# reaches 128 of them, so a loop takes groups of 128 columns, and each group fills
# 128 / block size lanes of the scales.

LANES = 128


@dataclass(frozen=True)
class TileEvaluator(KernelEvaluator):
    """A chunk of a tile: of its elements some columns, of its scales all.

    Attributes:
        rows: of the chunk.
        columns: of the chunk, a multiple of 128.
        block_size: how many columns share a scale. All rows share shifts, if there are
            any.
        scale_count: how many scales a row of the tile has.
        origin: the indices of the tile's first element in the part.
        first: the chunk's first column in the tile.
    """

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

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the chunk of an array."""
        if self.part.has_shifts(shape):
            return 1, self.columns
        is_element = shape == self.part.whole
        return self.rows, self.columns if is_element else self.scale_count

    def is_of_chunk(self) -> jax.Array:
        """Return which scales of the tile belong to this chunk."""
        at = lax.broadcasted_iota(jnp.int32, (self.rows, self.scale_count), 1)
        first = self.first >> self._shift
        return (at >= first) & (at < first + self.columns // self.block_size)

    def index(self, axis: int) -> jax.Array:
        """Return the indices in the whole array along an axis of the part."""
        shape, from_last = (self.rows, self.columns), len(self.part.shape) - 1 - axis
        start = self.origin[axis] + self.part.origin[axis]
        if from_last > 1:
            return jnp.full(shape, start, jnp.int32)
        at = lax.broadcasted_iota(jnp.int32, shape, 1 - from_last)
        return at + start + (0 if from_last else self.first)

    def spread(self, scales: jax.Array, axis: int) -> jax.Array:
        """Return for each element the scale of its block along an axis, -1 or -2."""
        if axis == -2:
            return jnp.broadcast_to(scales, (self.rows, self.columns))
        # The other way round: lane i of the elements takes lane i / block size.
        at = lax.broadcasted_iota(jnp.int32, (self.rows, self.columns), 1)
        return _take_lanes(scales, (at + self.first) >> self._shift)

    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        """Return the largest value of each block, in the place of its scale."""
        if axis == -2:
            return self._largest_of_columns(values)
        lane = lax.broadcasted_iota(jnp.int32, (self.rows, self.scale_count), 1)
        result = jnp.zeros((self.rows, self.scale_count), jnp.int32)
        for start in range(0, self.columns, LANES):
            part = values[:, start : start + LANES]
            shift = self.block_size // 2
            while shift:
                part = jnp.maximum(part, pltpu.roll(part, LANES - shift, 1))
                shift //= 2
            # Each block's largest is now in the lane of its first column.
            first = (self.first + start) >> self._shift
            index = ((lane - first) << self._shift) & (LANES - 1)
            found = _take_lanes(part, index)
            count = LANES // self.block_size
            result = jnp.where((lane >= first) & (lane < first + count), found, result)
        return result

    def _largest_of_columns(self, values: jax.Array) -> jax.Array:
        # Rows after the last one hold anything.
        row = lax.broadcasted_iota(jnp.int32, values.shape, 0) + self.origin[-2]
        values = jnp.where(row < self.part.shape[-2], values, 0)
        return jnp.max(values, axis=0, keepdims=True)


def _take_lanes(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return what is in the lanes of `x`, 128 at a time."""
    # Mosaic of JAX 0.8 takes an index of the shape of `x` alone.
    width = x.shape[1]
    groups = [
        jnp.take_along_axis(
            x, index[:, first : first + width], axis=1, mode="promise_in_bounds"
        )
        for first in range(0, index.shape[1], width)
    ]
    return groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=1)
