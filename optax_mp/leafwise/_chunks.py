"""Run the elementwise end of a step chunk by chunk, where a TPU has no kernel for it.

The registers of a TPU have 128 lanes, which blocks of 32 cross: XLA writes out what it
spreads over blocks, or reduces. If that is a chunk, it fits into memory on the chip,
and XLA leaves it there.

`_host_chunks` cuts otherwise. Here a chunk has a fixed size, and the rows may be
sharded in a way that is not known; so only large arrays of whole tiles are cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp.leafwise._block_operations import Blocks
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._evaluator import Part, PartEvaluator, XlaEvaluator
from optax_mp.leafwise._program import Program, Value

# On a TPU v5e, AdamW's step of as many or twice as many weights stays on the chip; of
# four times as many it does not.
_COUNT = 2**20
_ROWS = 32  # of a tile of 8-bit numbers


@dataclass(frozen=True)
class Cuts:
    """How a part is cut into chunks: all axes but the last are seen as one of rows.

    Rows that may be sharded are cut within each shard, so that devices do not send each
    other chunks: they are viewed as (groups, rest).

    Attributes:
        part: what is cut.
        groups: how many parts of the rows a chunk has some of.
        length: how many of each.
    """

    part: Part
    groups: int
    length: int

    @property
    def rest(self) -> int:
        """Return how many rows a group has."""
        return math.prod(self.part.shape[:-1]) // self.groups

    def view(self, x: jax.Array) -> jax.Array:
        """Return an array of rows, or of groups of rows."""
        # With an axis of one group XLA would copy it.
        groups = (self.groups,) if self.groups > 1 else ()
        return x.reshape(*groups, self.rest, x.shape[-1])

    def chunk(self, first: Any, length: int) -> "Chunk":
        """Return as many rows of each group, from the first on."""
        return Chunk(self, first, length)


@dataclass(frozen=True)
class Chunk(XlaEvaluator):
    """Some rows of each group.

    Attributes:
        cuts: of the part.
        first: the first of these rows in the first group.
        length: how many rows of each group.
    """

    cuts: Cuts
    first: Any
    length: int

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the chunk of an array."""
        return self.cuts.groups * self.length, self.cuts.part.shape_of(shape)[-1]

    def of(self, view: jax.Array) -> jax.Array:
        """Return the chunk of a view of an array."""
        rows = lax.dynamic_slice_in_dim(view, self.first, self.length, axis=-2)
        # Read once, and before anything is written: XLA would copy a whole array that
        # several fusions read, in each turn of the loop.
        return lax.optimization_barrier(rows.reshape(-1, view.shape[-1]))

    def put(self, view: jax.Array, chunk: jax.Array) -> jax.Array:
        """Return a view with another chunk in the place of this one."""
        shape = (*view.shape[:-2], self.length, view.shape[-1])
        rows = chunk.astype(view.dtype).reshape(shape)
        return lax.dynamic_update_slice_in_dim(view, rows, self.first, axis=-2)

    def index(self, axis: int) -> jax.Array:
        """Return the indices of the elements along an axis of the whole array."""
        part, last = self.cuts.part, len(self.cuts.part.shape) - 1
        shape = self.shape_of(part.whole)
        if axis == last:
            return lax.broadcasted_iota(jnp.int32, shape, 1) + part.origin[axis]
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        group = lax.div(row, jnp.int32(self.length))
        row += group * (self.cuts.rest - self.length) + self.first
        row = lax.div(row, jnp.int32(math.prod(part.shape[axis + 1 : last])))
        return lax.rem(row, jnp.int32(part.shape[axis])) + part.origin[axis]

    @property
    def blocks(self) -> Blocks:
        """The blocks of its arrays."""
        part = self.cuts.part
        return Blocks(1, part.block_size, part.shape[-1])


@dataclass(frozen=True)
class LineCuts:
    """How a part of one axis is cut into chunks.

    Attributes:
        part: what is cut.
        length: how many elements a chunk has: whole blocks.
    """

    part: Part
    length: int

    @property
    def rest(self) -> int:
        """Return how many elements there are."""
        return self.part.shape[0]

    def view(self, x: jax.Array) -> jax.Array:
        """Return an array as it is."""
        return x

    def chunk(self, first: Any, length: int) -> "LineChunk":
        """Return as many elements, from the first on."""
        origin = (self.part.origin[0] + first,)
        part = replace(self.part, shape=(length,), origin=origin)
        return LineChunk(part, self, first)


@dataclass(frozen=True)
class LineChunk(PartEvaluator):
    """Some elements of a part of one axis.

    Attributes:
        cuts: of the whole part.
        first: the first of these elements.
    """

    cuts: LineCuts
    first: Any

    def of(self, x: jax.Array) -> jax.Array:
        """Return the chunk of an array."""
        is_element = x.shape == self.cuts.part.shape
        (count,) = self.shape_of(self.part.whole if is_element else (0,))
        part = lax.dynamic_slice_in_dim(x, self._start(x), count)
        return lax.optimization_barrier(part)  # see `Chunk.of`

    def put(self, x: jax.Array, chunk: jax.Array) -> jax.Array:
        """Return an array with another chunk in the place of this one."""
        chunk = chunk.astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(x, chunk, self._start(x), axis=0)

    def _start(self, x: jax.Array) -> Any:
        is_element = x.shape == self.cuts.part.shape
        divisor = 1 if is_element else self.part.block_size
        return lax.div(jnp.int32(self.first), jnp.int32(divisor))


def cuts_of(part: Part, device_count: int) -> Cuts | LineCuts | None:
    """Return how to cut a part, or None if it is small or does not divide.

    Args:
        part: the part.
        device_count: how many devices may hold shards of it.
    """
    if len(part.shape) == 1:
        is_large = device_count == 1 and part.shape[0] > _COUNT
        return LineCuts(part, _COUNT) if is_large else None
    *before, height, width = (1, *part.shape)
    rows = math.prod(before) * height
    # Axes become one where no tile is broken up, and no shard.
    is_matrix = len(part.shape) == 2
    if not is_matrix and (device_count > 1 or height % _ROWS):
        return None
    # Each device has all groups of an array that is not sharded.
    length = max(1, _COUNT // (width * device_count * _ROWS)) * _ROWS
    is_large = rows > device_count * length and rows % device_count == 0
    return Cuts(part, device_count, length) if is_large else None


def run_end(
    program: Program, end: End, cuts: Cuts | LineCuts, args: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the outputs of an end.

    Args:
        program: the program that the end is of.
        end: the end.
        cuts: of its arrays.
        args: the values of what it reads.
    """
    outputs = [program.outputs[i] for i in end.outputs]
    shapes = [cuts.part.shape_of(value.aval.shape) for value in outputs]
    given = [
        cuts.view(x) if value.aval.ndim else x
        for value, x in zip(end.reads, args, strict=True)
    ]
    # What is replaced is read from where results go, so that it is overwritten.
    output_of = {read: at for at, read in end.replaced.items()}
    made = [
        given[end.replaced[at]]
        if at in end.replaced
        else cuts.view(jnp.zeros(shape, value.aval.dtype))
        for at, (value, shape) in enumerate(zip(outputs, shapes, strict=True))
    ]

    def run_chunk(
        chunk: Chunk | LineChunk, made: Sequence[jax.Array]
    ) -> list[jax.Array]:
        known: dict[Value, Any] = {}
        for i, value in enumerate(end.reads):
            x = made[output_of[i]] if i in output_of else given[i]
            known[value] = chunk.of(x) if value.aval.ndim else x
        chunk.run_all(program, end, known)
        return [
            chunk.put(x, known[value]) for value, x in zip(outputs, made, strict=True)
        ]

    def run_number(number: jax.Array, made: Sequence[jax.Array]) -> list[jax.Array]:
        return run_chunk(cuts.chunk(number * cuts.length, cuts.length), made)

    count, left_over = divmod(cuts.rest, cuts.length)
    made = lax.fori_loop(jnp.int32(0), jnp.int32(count), run_number, made)
    if left_over:
        made = run_chunk(cuts.chunk(count * cuts.length, left_over), made)
    return [x.reshape(shape) for x, shape in zip(made, shapes, strict=True)]
