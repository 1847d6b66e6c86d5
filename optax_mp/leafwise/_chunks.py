"""Run the elementwise end of a step chunk by chunk, where a TPU has no kernel for it.

The registers of a TPU have 128 lanes, which blocks of 32 cross: XLA writes out what it
spreads over blocks, or reduces. If that is a chunk, it fits into memory on the chip,
and XLA leaves it there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp.leafwise._blocks import Blocks
from optax_mp.leafwise._cut import End
from optax_mp.leafwise._part import Part, Piece
from optax_mp.leafwise._program import Program

# On a TPU v5e, AdamW's step of as many or twice as many weights stays on the chip; of
# four times as many it does not.
_COUNT = 2**20


@dataclass(frozen=True)
class Cuts:
    """How a piece is cut into chunks.

    An axis that may be sharded is cut within each shard, so that devices do not send
    each other chunks: it is viewed as (groups, rest).

    Attributes:
        piece: what is cut.
        axis: along which. A chunk has one of each axis before it, and all after it.
        groups: how many parts of the axis a chunk has some of.
        length: of a chunk along the axis, in each group.
    """

    piece: Piece
    axis: int
    groups: int
    length: int

    @classmethod
    def of(cls, piece: Piece, device_count: int) -> "Cuts | None":
        """Return how to cut a piece, or None if it is small or does not divide.

        Args:
            piece: the piece.
            device_count: how many devices may hold shards of it.
        """
        shape, last = piece.shape, len(piece.shape) - 1
        axis = 0
        if device_count == 1:
            large = [i for i in range(last) if math.prod(shape[i:]) > _COUNT]
            axis = max(large, default=0)
        # Chunks begin where tiles of 8-bit numbers do, or 128 scales.
        unit = {last: 128 * piece.block_size, last - 1: 32}.get(axis, 1)
        length = max(1, _COUNT // (math.prod(shape[axis + 1 :]) * unit)) * unit
        is_even = axis != last or shape[axis] % (device_count * piece.block_size) == 0
        if shape[axis] % device_count or not is_even:
            return None
        cuts = cls(piece, axis, device_count, length)
        return cuts if math.prod(shape[:axis]) * cuts.rest > length else None

    @property
    def rest(self) -> int:
        """Return the length of a group along the axis."""
        return self.piece.shape[self.axis] // self.groups

    def view(self, x: jax.Array) -> jax.Array:
        """Return an array with the axis as (groups, rest)."""
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        return x.reshape(*before, *self.of_groups, -1, *after)

    @property
    def of_groups(self) -> tuple[int, ...]:
        """Return the shape of the groups. With one more axis XLA would copy arrays."""
        return (self.groups,) if self.groups > 1 else ()

    def chunk(self, first: int, length: int, number: jax.Array) -> "Chunk":
        """Return a chunk.

        Args:
            first: where chunks of this length begin along the axis.
            length: of each.
            number: which one.
        """
        at = []
        for size in reversed(self.piece.shape[: self.axis]):
            at.insert(0, lax.rem(number, jnp.int32(size)))
            number = lax.div(number, jnp.int32(size))
        return Chunk(self, tuple(at), first, number, length)


@dataclass(frozen=True)
class Chunk(Part):
    """A chunk of a piece, as part of a view of it.

    Attributes:
        cuts: of the piece.
        at: its place along each axis before the one that is cut.
        first: where chunks of this length begin along the axis.
        step: which of these it is.
        length: of each group.
    """

    cuts: Cuts
    at: tuple[Any, ...]
    first: int
    step: Any
    length: int

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the chunk of an array."""
        piece, axis = self.cuts.piece, self.cuts.axis
        length = self.length // self._per_index(shape)
        after = piece.shape_of(shape)[axis + 1 :]
        return (*[1] * axis, *self.cuts.of_groups, length, *after)

    def of(self, view: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the chunk of the view of an array that has a shape in the program."""
        return lax.dynamic_slice(view, self._start(shape), self.shape_of(shape))

    def put(
        self, view: jax.Array, chunk: jax.Array, shape: tuple[int, ...]
    ) -> jax.Array:
        """Return the view with another chunk in the place of this one."""
        chunk = chunk.astype(view.dtype)
        return lax.dynamic_update_slice(view, chunk, self._start(shape))

    def _start(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        # XLA must see that a chunk begins where a tile does: no division here.
        each = self._per_index(shape)
        begin = self.step * (self.length // each) + self.first // each
        after = [0] * (len(shape) - 1 - self.cuts.axis)
        return (*self.at, *[0 for _ in self.cuts.of_groups], begin, *after)

    def _per_index(self, shape: tuple[int, ...]) -> int:
        """Return how many elements along the axis an index of an array is for."""
        piece = self.cuts.piece
        is_of_scales = shape != piece.whole and self.cuts.axis == len(shape) - 1
        return piece.block_size if is_of_scales else 1

    def index(self, axis: int) -> jax.Array:
        """Return the indices of the elements along an axis of the whole array."""
        piece, cut = self.cuts.piece, self.cuts.axis
        shape, extra = self.shape_of(piece.whole), len(self.cuts.of_groups)
        dimension = axis if axis < cut else axis + extra
        at = lax.broadcasted_iota(jnp.int32, shape, dimension)
        if axis <= cut:
            at += self._start(piece.whole)[dimension]
        if axis == cut and extra:
            at += lax.broadcasted_iota(jnp.int32, shape, axis) * self.cuts.rest
        return at + piece.origin[axis]

    def spread(self, scales: jax.Array) -> jax.Array:
        """Return for each element the scale of its block."""
        return self._blocks.spread(scales)

    def reduce(self, name: str, values: jax.Array) -> jax.Array:
        """Return the extreme of each block."""
        return self._blocks.reduce(name, values)

    @property
    def _blocks(self) -> Blocks:
        shape = self.shape_of(self.cuts.piece.whole)
        return Blocks(len(shape) - 1, self.cuts.piece.block_size, shape[-1])


def run_end(
    program: Program, end: End, cuts: Cuts, args: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the outputs of an end.

    Args:
        program: the program that the end is of.
        end: the end.
        cuts: of its arrays.
        args: the values of what it reads.
    """
    outputs = [program.outputs[i] for i in end.outputs]
    given = [cuts.view(x) if v.aval.ndim else x for v, x in zip(end.reads, args, strict=True)]
    # What is replaced is read from where results go, so that it is overwritten.
    output_of = {read: at for at, read in end.replaced.items()}
    made = [
        given[end.replaced[at]]
        if at in end.replaced
        else cuts.view(jnp.zeros(cuts.piece.shape_of(v.aval.shape), v.aval.dtype))
        for at, v in enumerate(outputs)
    ]

    def run_chunk(chunk: Chunk, made: Sequence[jax.Array]) -> list[jax.Array]:
        known: dict[Any, Any] = {}
        for i, value in enumerate(end.reads):
            x = made[output_of[i]] if i in output_of else given[i]
            known[value] = chunk.of(x, value.aval.shape) if value.aval.ndim else x
        chunk.run_all(program, end, known)
        return [
            chunk.put(x, known[value], value.aval.shape)
            for value, x in zip(outputs, made, strict=True)
        ]

    before = math.prod(cuts.piece.shape[: cuts.axis])
    steps, left_over = divmod(cuts.rest, cuts.length)
    made = _repeat(
        before * steps, lambda i, x: run_chunk(cuts.chunk(0, cuts.length, i), x), made
    )
    if left_over:
        first = steps * cuts.length
        made = _repeat(
            before, lambda i, x: run_chunk(cuts.chunk(first, left_over, i), x), made
        )
    shapes = [cuts.piece.shape_of(value.aval.shape) for value in outputs]
    return [x.reshape(shape) for x, shape in zip(made, shapes, strict=True)]


def _repeat(count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)
