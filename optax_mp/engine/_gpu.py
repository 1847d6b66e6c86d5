"""Run the elementwise tail of a step in one Pallas kernel on a GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._experimental import experimental
from optax_mp.engine._evaluator import (
    DTYPES,
    KernelEvaluator,
    Refs,
    dtype_obstacle,
    to_register_dtype,
)
from optax_mp.engine._layout import Part
from optax_mp.engine._tails import ElementwiseTail

pl, triton = experimental("pallas"), experimental("pallas.triton")

# Elements of a piece at least, at most, and for each thread: with sixteen, XLA takes
# twice as long to compile a kernel. A warp has 32 threads, and a piece up to 32 warps.
_COUNT, _MOST, _PER_WARP, _WARPS = 2048, 2**14, 8 * 32, 32
# Columns of a piece at least: memory is read in runs of 32 bytes.
_COLUMNS = 32


@dataclass(frozen=True)
class PieceEvaluator(KernelEvaluator):
    """A piece of the elements of a part, and their scales and shifts.

    Arrays are seen as they lie in memory: [layers, rows, runs of a row, elements of a
    run]. A run shares a scale, and the rows of a piece share shifts. If elements lie
    between those of a block, it is the other way round: the rows of a piece share
    scales, and a run shares a shift.

    Attributes:
        view: the shape that arrays of elements are seen as.
        is_turned: whether the rows of a piece share scales.
        height: how many rows a piece has.
        shape: of a piece: its rows, runs and elements of a run, each the next power of
            two, as Triton wants it.
        at: the layer, and the places of the piece among those along rows and runs.
    """

    view: tuple[int, int, int, int]
    is_turned: bool
    height: int
    shape: tuple[int, int, int]
    at: tuple[Any, Any, Any] = (0, 0, 0)

    @classmethod
    def first_of(cls, part: Part) -> "PieceEvaluator":
        """Return the first piece of a part."""
        (*others, length), height, run = part.shape, part.group_size, part.block_size
        between = math.prod(others[part.axis :])
        is_turned = between > 1
        if is_turned:
            height, run = run, height
            view = math.prod(others[: part.axis]), length, between // run, run
        elif height == 1:
            # Without shifts arrays are one row: rows of whole blocks follow each other
            # without a gap, and so do their scales.
            view = 1, 1, math.prod(part.shape) // run, run
        else:
            view = math.prod(others[:-1]), others[-1], length // run, run
        rows, columns = _power_of_two(height), _power_of_two(run)
        runs = max(_COUNT // rows, _COLUMNS) // columns
        runs = max(1, min(runs, _power_of_two(view[2])))
        return cls(part, view, is_turned, height, (rows, runs, columns))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return how many pieces there are along each axis."""
        layers, height, runs, _ = self.view
        return layers, -(-height // self.height), -(-runs // self.shape[1])

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many rows, and elements of a run, share an entry of an array."""
        rows, columns = self.part.block_of(shape)
        return (columns, rows) if self.is_turned else (rows, columns)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the piece of an array."""
        (down, across), (rows, runs, columns) = self._sizes(shape), self.shape
        return rows if down == 1 else 1, runs, columns if across == 1 else 1

    def view_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the part of an array is seen as."""
        (down, across), (layers, height, runs, run) = self._sizes(shape), self.view
        return layers, -(-height // down), runs, run // across

    def places(self, shape: tuple[int, ...]) -> tuple[Any, jax.Array | None]:
        """Return where the piece of an array is in its view, and what of it exists.

        None if all pieces are whole.
        """
        own, (layer, i, j) = self.shape_of(shape), self.at
        _, height, runs, run = self.view_of(shape)
        step = self.height if self._sizes(shape)[0] == 1 else 1
        # None is a number that JAX knows: it would refuse a piece that sticks out.
        starts = i * step, j * own[1], j * 0
        at = layer, *(pl.ds(*both) for both in zip(starts, own, strict=True))
        sizes = self.height, self.shape[1], self.view[3]
        is_whole = self.view[1] % self.height == 0 and self.view[2] % sizes[1] == 0
        if is_whole and self.shape == sizes:
            return at, None
        ends = jnp.minimum(step, height - starts[0]), runs - starts[1], run
        row, column, element = (
            lax.broadcasted_iota(jnp.int32, own, axis) < end
            for axis, end in enumerate(ends)
        )
        return at, row & column & element

    def index(self, axis: int) -> jax.Array:
        """Return the indices in the whole array along an axis of the part."""
        # From the place in memory, where the last axis runs fastest.
        part, (layer, i, j), (_, height, runs, run) = self.part, self.at, self.view
        row, column, element = (
            lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in range(3)
        )
        row += layer * height + i * self.height
        at = (row * runs + column + j * self.shape[1]) * run + element
        axes = part.in_memory(range(len(part.shape)))
        after = axes[axes.index(axis) + 1 :]
        at = lax.div(at, jnp.int32(math.prod(part.shape[x] for x in after)))
        at = at if axis == axes[0] else lax.rem(at, jnp.int32(part.shape[axis]))
        return at + part.origin[axis]

    def spread(self, scales: jax.Array, axis: int) -> jax.Array:
        """Return for each element the scale of its block along an axis, -1 or -2.

        The result has `shape`, and the dtype of the scales.
        """
        return jnp.broadcast_to(scales, self.shape)

    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        """Return the largest value of each block along an axis, -1 or -2.

        `values` are integers of `shape`. The result has one row, or one element a run.
        """
        # Unlike a TPU's lanes, the threads of a GPU exchange values freely.
        _, is_inside = self.places(self.part.whole)
        if is_inside is not None:
            values = jnp.where(is_inside, values, 0)
        along = 2 if (axis == -1) != self.is_turned else 0
        return jnp.max(values, axis=along, keepdims=True)

    def run_piece(
        self, tail: ElementwiseTail, values: Refs, inputs: Refs, outputs: Refs
    ) -> None:
        """Compute what one program of the grid does: see `KernelEvaluator`."""
        # One axis of the grid: the others of a GPU have 65,535 places.
        (_, down, across), number = map(jnp.int32, self.counts), pl.program_id(0)
        i = lax.div(number, across)
        at = lax.div(i, down), lax.rem(i, down), lax.rem(number, across)
        piece = replace(self, at=at)
        for value, ref in inputs.items():
            places, inside = piece.places(value.aval.shape)
            other = None if inside is None else 0
            read = triton.load(ref.at[places], mask=inside, other=other)
            values[value] = to_register_dtype(read, value.aval.dtype)
        piece.run_all(tail, values)
        for value, ref in outputs.items():
            places, inside = piece.places(value.aval.shape)
            new = values[value].astype(value.aval.dtype)
            triton.store(ref.at[places], new, mask=inside)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def obstacle(tail: ElementwiseTail, part: Part) -> str | None:
    """Return why the kernel cannot compute a tail; None if it can."""
    if other := dtype_obstacle(tail, DTYPES):
        return other
    first = PieceEvaluator.first_of(part)
    if math.prod(first.shape) > _MOST:
        return f"blocks of {part.block_size} and groups of {part.group_size}"
    size = first.view[3]
    if part.in_memory(part.shape)[-1] % size:
        return f"last axis not a multiple of {size}"
    if math.prod(part.shape) >= 2**31:
        return "2^31 elements or more"
    return None


def run_tail(tail: ElementwiseTail, part: Part, args: Sequence[Any]) -> list[Any]:
    """Return the outputs of a tail.

    Args:
        tail: the tail.
        part: of its arrays.
        args: the values of what it reads: for an array of elements `part.shape`, for
            scales the same with `columns / block_size` columns, for shifts with
            `rows / group_size` rows, in any of `DTYPES`; scalars.
    """
    first = PieceEvaluator.first_of(part)
    warps = min(max(1, math.prod(first.shape) // _PER_WARP), _WARPS)
    params, grid = triton.CompilerParams(num_warps=warps), (math.prod(first.counts),)
    # XLA cancels these transpositions with those that put the axis of blocks last.
    stored = [jnp.moveaxis(x, -1, part.axis) if jnp.ndim(x) else x for x in args]
    made = first.call(pl.pallas_call, tail, stored, grid=grid, compiler_params=params)
    shapes = [part.shape_of(value.aval.shape) for value in tail.outputs]
    return [
        jnp.moveaxis(x.reshape(part.in_memory(shape)), part.axis, -1)
        for x, shape in zip(made, shapes, strict=True)
    ]
