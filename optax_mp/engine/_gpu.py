"""Run the elementwise tail of a step in one Pallas kernel on a GPU."""

import functools
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
    call_kernel,
    dtype_obstacle,
    to_register_dtype,
)
from optax_mp.engine._layout import Part, shape_in_blocks
from optax_mp.engine._tails import ElementwiseTail

pl, triton = experimental("pallas"), experimental("pallas.triton")

# Elements of a piece at least, and for each thread: with sixteen, XLA takes twice as
# long to compile a kernel. A warp has 32 threads.
_COUNT, _PER_WARP = 2048, 8 * 32
# Columns of a piece at least: memory is read in runs of 32 bytes.
_COLUMNS = 32


@dataclass(frozen=True)
class PieceEvaluator(KernelEvaluator):
    """A piece of the elements of a part, and their scales and shifts.

    Attributes:
        view: the shape that arrays of elements are seen as: layers, rows, columns.
        height: how many rows a piece has; with shifts, those of a group.
        rows: the next power of two, as Triton wants it.
        columns: how many columns a piece has.
        at: the layer, and the places of the piece among those along rows and columns.
    """

    view: tuple[int, int, int]
    height: int
    rows: int
    columns: int
    at: tuple[Any, Any, Any] = (0, 0, 0)

    @classmethod
    def first_of(cls, part: Part) -> "PieceEvaluator":
        """Return the first piece of a part."""
        # Without shifts arrays are one row, in the order of memory: rows of whole
        # blocks follow each other without a gap, and so do their scales.
        if part.group_size == 1:
            return cls(part, (1, 1, math.prod(part.shape)), 1, 1, _COUNT)
        (*leading, length, width), height = part.shape, part.group_size
        rows = 1 << (height - 1).bit_length()
        columns = max(_COUNT // rows, _COLUMNS, part.block_size)
        return cls(part, (math.prod(leading), length, width), height, rows, columns)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return how many pieces there are along each axis."""
        layers, height, width = self.view
        return layers, -(-height // self.height), -(-width // self.columns)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the piece of an array: of its last two axes."""
        rows, columns = self.part.block_of(shape)
        return self.rows if rows == 1 else 1, self.columns // columns

    def view_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the part of an array is seen as."""
        return shape_in_blocks(self.view, *self.part.block_of(shape))

    def places(self, shape: tuple[int, ...]) -> tuple[Any, jax.Array | None]:
        """Return where the piece of an array is in its view, and what of it exists.

        None if all pieces are whole.
        """
        own, (layer, i, j) = self.shape_of(shape), self.at
        _, height, width = self.view_of(shape)
        step = self.height if self.part.block_of(shape)[0] == 1 else 1
        at = layer, pl.ds(i * step, own[0]), pl.ds(j * own[1], own[1])
        is_whole = self.view[1] % self.height == 0 and self.view[2] % self.columns == 0
        if is_whole and self.rows == self.height:
            return at, None
        row, column = (lax.broadcasted_iota(jnp.int32, own, axis) for axis in (0, 1))
        is_inside = (row < jnp.minimum(step, height - i * step)) & (
            column < width - j * own[1]
        )
        return at, is_inside

    def index(self, axis: int) -> jax.Array:
        """Return the indices in the whole array along an axis of the part."""
        # From the place in memory, where the last axis runs fastest.
        own, (layer, i, j) = self.shape_of(self.part.whole), self.at
        _, height, width = self.view
        row = lax.broadcasted_iota(jnp.int32, own, 0)
        row += layer * height + i * self.height
        at = row * width + lax.broadcasted_iota(jnp.int32, own, 1) + j * own[1]
        shape = self.part.shape
        at = lax.div(at, jnp.int32(math.prod(shape[axis + 1 :])))
        at = at if not axis else lax.rem(at, jnp.int32(shape[axis]))
        return at + self.part.origin[axis]

    def spread(self, scales: jax.Array, axis: int) -> jax.Array:
        """Return for each element the scale of its block along an axis, -1 or -2."""
        shape = self.shape_of(self.part.whole)
        if axis == -1:
            blocks = (*scales.shape, self.part.block_size)
            scales = jnp.broadcast_to(scales[:, :, None], blocks).reshape(shape)
        return jnp.broadcast_to(scales, shape)

    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        """Return the largest value of each block along an axis, -1 or -2."""
        # Unlike a TPU's lanes, the threads of a GPU exchange values freely: Triton
        # reshapes to blocks, and reduces these.
        if axis == -1:
            blocks = (values.shape[0], -1, self.part.block_size)
            return jnp.max(values.reshape(blocks), axis=2)
        _, is_inside = self.places(self.part.whole)
        if is_inside is not None:
            values = jnp.where(is_inside, values, 0)
        return jnp.max(values, axis=0)[None, :]


def obstacle(tail: ElementwiseTail, part: Part) -> str | None:
    """Return why the kernel cannot compute a tail; None if it can."""
    if other := dtype_obstacle(tail, DTYPES):
        return other
    size = part.block_size
    if _COUNT % size:
        return f"blocks of {size}"
    if part.group_size > 128:
        return f"groups of {part.group_size} rows"
    if part.shape[-1] % size:
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
    _, down, across = first.grid

    def kernel(here: Part, values: Any, inputs: Any, outputs: Any) -> None:
        # One axis of the grid: the others of a GPU have 65,535 places.
        number = pl.program_id(0)
        i = lax.div(number, jnp.int32(across))
        at = (
            lax.div(i, jnp.int32(down)),
            lax.rem(i, jnp.int32(down)),
            lax.rem(number, jnp.int32(across)),
        )
        piece = replace(first, part=here, at=at)
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

    warps = max(1, first.rows * first.columns // _PER_WARP)
    pallas_call = functools.partial(
        pl.pallas_call,
        grid=(math.prod(first.grid),),
        compiler_params=triton.CompilerParams(num_warps=warps),
    )
    return call_kernel(kernel, pallas_call, first.view_of, tail, part, args)
