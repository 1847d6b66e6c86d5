"""Run the elementwise tail of a step in one Pallas kernel on a TPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._arrays import to_host
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

pl, pltpu = experimental("pallas"), experimental("pallas.tpu")

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
_ROWS, _ROW_BITS = 32, 5  # Mosaic's tiles of 8-bit numbers are 32 x 128.
_SUBLANES, _SHORT = 8, 16  # rows of a register, and of a short group
_PACKED = 4  # rows of 8-bit numbers, in one of 32-bit numbers
_CHUNK = 512


@dataclass(frozen=True)
class TileEvaluator(KernelEvaluator):
    """A chunk of a tile: of its elements some columns, of its 128 scales a row all.

    Each program of the grid has a tile of a part: some rows, and as many columns as
    have 128 scales, or all. Mosaic copies the tiles of the next program while one
    computes. Inside, a loop takes the columns by chunks, so that intermediate values
    fit into registers.

    Attributes:
        block_size: how many columns share a scale.
        rows: of a tile.
        columns: of a tile.
        shared: how many tiles along the columns share a tile of scales.
        chunk: how many columns a chunk has, a multiple of 128.
        origin: the indices in the part of the first element of those tiles.
        first: the chunk's first column, counted from there.
    """

    packs: ClassVar[bool] = True  # a number by itself takes 1 KB of a small memory
    block_size: int
    rows: int
    columns: int
    shared: int
    chunk: int
    origin: tuple[Any, ...] = ()
    first: Any = 0

    @classmethod
    def first_of(cls, part: Part) -> "TileEvaluator":
        """Return the first chunk of a part."""
        height, width = part.shape[-2:]
        block_size = part.block_size if part.block_size > 1 else 32
        # Of short groups as many as make a tile of shifts.
        is_short = 1 < part.group_size <= _SHORT
        rows = part.group_size * _ROWS if is_short else math.lcm(_ROWS, part.group_size)
        rows = min(rows, height)
        # As many columns as 128 scales are for, since those fill a register's lanes.
        # Tiles of more rows have fewer, and several of them share a tile of scales.
        columns = block_size * LANES >> max(0, (rows - 1).bit_length() - _ROW_BITS)
        columns = min(max(columns, LANES), width)
        shared = max(1, block_size * LANES // columns)
        chunk = math.gcd(columns, _CHUNK if rows <= _ROWS else LANES)
        return cls(part, block_size, rows, columns, shared, chunk)

    @property
    def grid(self) -> tuple[int, ...]:
        """Return how many tiles there are along each axis."""
        *leading, height, width = self.part.shape
        return *leading, pl.cdiv(height, self.rows), pl.cdiv(width, self.columns)

    def is_scales(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of a shape is of scales."""
        return self.part.block_of(shape)[1] > 1

    def has_single_rows(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array is of shifts whose rows are tiles by themselves.

        A few of many rows are no tile.
        """
        is_tile = self.shape_of(shape)[0] % _ROWS == 0
        is_tile |= self.rows == self.part.shape[-2]
        return self.part.block_of(shape)[0] > 1 and not is_tile

    def view_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the kernel gets the part of an array as."""
        own = self.part.shape_of(shape)
        return (*own[:-1], 1, own[-1]) if self.has_single_rows(shape) else own

    def spec(self, shape: tuple[int, ...]) -> Any:
        """Return the tile of an array that a program has."""
        tile = *[None] * (len(self.part.shape) - 2), self.shape_of(shape)[0]
        if self.is_scales(shape):
            return pl.BlockSpec(
                (*tile, LANES),
                lambda *at: (*at[:-1], lax.div(at[-1], jnp.int32(self.shared))),
            )
        if self.has_single_rows(shape):
            tile = *tile, 1
            return pl.BlockSpec(
                (*tile, self.columns), lambda *at: (*at[:-1], 0, at[-1])
            )
        return pl.BlockSpec((*tile, self.columns), lambda *at: at)

    def places(self, shape: tuple[int, ...], first: Any) -> list[tuple[Any, ...]]:
        """Return where a chunk's elements or shifts are in their tile."""
        columns = pl.ds(first, self.chunk)
        if not self.has_single_rows(shape):
            return [(slice(None), columns)]
        return [(i, slice(None), columns) for i in range(self.shape_of(shape)[0])]

    @property
    def _shift(self) -> int:
        # Divisions of signed numbers ask what kind of TPU this is.
        return self.block_size.bit_length() - 1

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the chunk of an array."""
        rows, columns = self.part.block_of(shape)
        return pl.cdiv(self.rows, rows), self.chunk if columns == 1 else LANES

    def is_of_chunk(self) -> jax.Array:
        """Return which scales of the tile belong to this chunk."""
        at = lax.broadcasted_iota(jnp.int32, (self.rows, LANES), 1)
        first = self.first >> self._shift
        return (at >= first) & (at < first + self.chunk // self.block_size)

    def index(self, axis: int) -> jax.Array:
        """Return the indices in the whole array along an axis of the part."""
        shape, from_last = (self.rows, self.chunk), len(self.part.shape) - 1 - axis
        start = self.origin[axis] + self.part.origin[axis]
        if from_last > 1:
            return jnp.full(shape, start, jnp.int32)
        at = lax.broadcasted_iota(jnp.int32, shape, 1 - from_last)
        return at + start + (0 if from_last else self.first)

    def spread(self, scales: jax.Array, axis: int) -> jax.Array:
        """Return for each element the scale of its block along an axis, -1 or -2.

        Scales are [rows, 128] along the last axis, else [groups, columns]; the result
        is [rows, columns] of their dtype.
        """
        if axis == -2:
            size, groups = self.part.group_size, []
            for i, first in enumerate(range(0, self.rows, size)):
                shape = min(size, self.rows - first), self.chunk
                groups.append(jnp.broadcast_to(scales[i : i + 1], shape))
            return jnp.concatenate(groups)
        # The other way round: lane i of the elements takes lane i / block size.
        at = lax.broadcasted_iota(jnp.int32, (self.rows, self.chunk), 1)
        return _take_lanes(scales, (at + self.first) >> self._shift)

    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        """Return the largest value of each block, in the place of its scale.

        `values` are int32, [rows, columns]; the result is [rows, 128] along the last
        axis, with zeros for other chunks, else [groups, columns].
        """
        if axis == -2:
            return self._largest_of_columns(values)
        lane = lax.broadcasted_iota(jnp.int32, (self.rows, LANES), 1)
        result = jnp.zeros((self.rows, LANES), jnp.int32)
        for start in range(0, self.chunk, LANES):
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
        size = self.part.group_size
        groups = (values[i : i + size] for i in range(0, self.rows, size))
        return jnp.concatenate([jnp.max(x, axis=0, keepdims=True) for x in groups])

    def run_piece(
        self, tail: ElementwiseTail, values: Refs, inputs: Refs, outputs: Refs
    ) -> None:
        """Compute a tile: see `KernelEvaluator`."""
        ids = [pl.program_id(axis) for axis in range(len(self.part.shape))]
        # Columns are counted from where the tile of scales begins.
        place = ids[-1] & (self.shared - 1)
        start = (*ids[:-2], ids[-2] * self.rows, (ids[-1] - place) * self.columns)
        tile = replace(self, origin=start, first=place * self.columns)
        for value, ref in inputs.items():
            if self.is_scales(value.aval.shape):
                values[value] = to_register_dtype(ref[...], value.aval.dtype)
        of_scales = [x for x in outputs if self.is_scales(x.aval.shape)]

        def run_chunk(k: Any, scales: Sequence[Any]) -> list[Any]:
            first = pl.multiple_of(k * self.chunk, self.chunk)
            chunk, local = replace(tile, first=tile.first + first), dict(values)
            for value, ref in inputs.items():
                if value not in values:
                    read = [ref[at] for at in self.places(value.aval.shape, first)]
                    read = jnp.concatenate(read)
                    local[value] = to_register_dtype(read, value.aval.dtype)
            chunk.run_all(tail, local)
            # Elements are stored at once. The scales of a chunk fill only a part of a
            # register's lanes. So the loop carries all scales of the tile, each chunk
            # sets its own, and they are stored at the end.
            for value, ref in outputs.items():
                if value not in of_scales:
                    result = local[value].astype(ref.dtype)
                    places = self.places(value.aval.shape, first)
                    for i, at in enumerate(places):
                        ref[at] = result if len(places) == 1 else result[i : i + 1]
            both = zip(of_scales, scales, strict=True)
            return [jnp.where(chunk.is_of_chunk(), local[x], old) for x, old in both]

        # Keep scales set by earlier tiles.
        made = [outputs[value][...].astype(jnp.float32) for value in of_scales]
        made = lax.fori_loop(0, self.columns // self.chunk, run_chunk, made)
        for value, result in zip(of_scales, made, strict=True):
            outputs[value][...] = result.astype(value.aval.dtype)


def _take_lanes(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return what is in the lanes of `x`, [rows, 128], at `index`, [rows, columns]."""
    # Mosaic of JAX 0.8 only takes an index of the shape of `x`.
    width = x.shape[1]
    groups = [
        jnp.take_along_axis(
            x, index[:, first : first + width], axis=1, mode="promise_in_bounds"
        )
        for first in range(0, index.shape[1], width)
    ]
    return jnp.concatenate(groups, axis=1)


def obstacle(tail: ElementwiseTail, part: Part) -> str | None:
    """Return why Mosaic cannot compute a tail; None if it can."""
    if other := dtype_obstacle(tail, DTYPES - {"float16"}):
        return other
    if any(value.aval.dtype == jnp.bool_ for value in tail.outputs):
        return "writes an array of bools"
    if len(part.shape) < 2:
        return "1-D array"
    # Mosaic has no way to lower these.
    if part.shape[-2] == 1:
        return "one row"
    if getattr(jax.config, "jax_enable_x64", False):
        return "64-bit types are on"
    # XLA lays such arrays out by columns, and would copy them for a kernel.
    if part.shape[-1] % LANES:
        return f"last axis not a multiple of {LANES}"
    block_size, group_size = part.block_size, part.group_size
    if group_size not in (1, part.shape[-2]) and group_size % _SUBLANES:
        return f"groups of {group_size} rows"
    if block_size > 1 and (block_size < 8 or LANES % block_size):
        return f"blocks of {block_size}"
    return None


def run_tail(tail: ElementwiseTail, part: Part, args: Sequence[Any]) -> list[Any]:
    """Return the outputs of a tail.

    Args:
        tail: the tail.
        part: of its arrays.
        args: the values of what it reads: for an array of elements `part.shape`, for
            scales the same with `columns / block_size` columns, for shifts with
            `rows / group_size` rows, in any of `DTYPES` but float16; scalars.
    """
    first = TileEvaluator.first_of(part)
    reads, outputs = ([x.aval.shape for x in xs] for xs in (tail.reads, tail.outputs))
    in_scalar_memory = pl.BlockSpec(memory_space=pltpu.SMEM)
    made = first.call(
        pl.pallas_call,
        tail,
        args,
        grid=first.grid,
        in_specs=[in_scalar_memory] * 2 + [first.spec(x) for x in reads if x],
        out_specs=list(map(first.spec, outputs)),
    )
    both = zip(made, map(part.shape_of, outputs), strict=True)
    return [x.reshape(shape) for x, shape in both]


def read_rows(view: jax.Array, first: Any, length: int) -> jax.Array:
    """Return some rows of an array of 8-bit numbers in host memory, on the device.

    Args:
        view: the array, [rows, columns] of int8 or uint8, with rows of whole tiles.
        first: int32 scalar, the first row, a multiple of the 32 rows of a tile.
        length: how many rows, another multiple.
    """
    shape = length // _PACKED, view.shape[1]
    # On the device, but not in memory on the chip, where XLA might put it.
    made = pltpu.HBM.from_type(jax.typeof(view).update(shape=shape, dtype=jnp.int32))
    return from_words(_copy_words(made, first, view), view.dtype)


def write_rows(view: jax.Array, rows: jax.Array, first: Any) -> jax.Array:
    """Return an array in host memory with other rows, which are on the device.

    Args:
        view: the array, as of `read_rows`.
        rows: [length, columns], of the dtype of `view`.
        first: int32 scalar, where they begin.
    """
    return to_host(_copy_words(jax.typeof(view), first, view, as_words(rows)))


def as_words(rows: jax.Array) -> jax.Array:
    """Return rows of 8-bit numbers, each four as one of 32-bit numbers.

    From [rows, columns] of int8 or uint8 to [rows / 4, columns] of int32.
    XLA chooses between two tilings for 8-bit numbers, and copies between memories do
    not convert. For 32-bit numbers there is one. On a TPU both lie alike in memory.
    """
    codes = lax.bitcast_convert_type(rows, jnp.uint8).astype(jnp.int32)
    codes = codes.reshape(-1, _PACKED, rows.shape[1])
    return (codes << _shifts()).sum(1, dtype=jnp.int32)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Return the rows of 8-bit numbers, of `dtype`, that `as_words` took."""
    codes = (words[:, None] >> _shifts()) & 255
    codes = codes.reshape(-1, words.shape[1]).astype(jnp.uint8)
    return lax.bitcast_convert_type(codes, dtype)


def _shifts() -> jax.Array:
    """Return by how many bits each of the rows in a word is shifted."""
    return 8 * jnp.arange(_PACKED, dtype=jnp.int32)[:, None]


def _copy_words(made: Any, first: Any, view: jax.Array, *words: jax.Array) -> jax.Array:
    """Return words of an array in host memory, or the array with other words.

    Args:
        made: the type of the result.
        first: int32 scalar, the first row, not counted in words.
        view: the array, [rows, columns] of int8 or uint8.
        *words: [length / 4, columns] of int32, to put in; without, some are returned.
    """

    def kernel(first: Any, view: Any, words: Any, *others: Any) -> None:
        *result, semaphore = others
        start = pl.multiple_of(lax.div(first[0], _PACKED), _ROWS // _PACKED)
        array = result[0] if result else view
        rows = array.bitcast(jnp.int32).at[pl.ds(start, words.shape[0])]
        source, target = (words, rows) if result else (rows, words)
        pltpu.async_copy(source, target, semaphore).wait()

    host, device = (pl.BlockSpec(memory_space=x) for x in (pl.HOST, pl.ANY))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        in_specs=[host, device] if words else [host],
        out_specs=host if words else device,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    alias = {1: 0} if words else {}
    return pl.pallas_call(
        kernel, grid_spec=grid_spec, out_shape=made, input_output_aliases=alias
    )(jnp.asarray(first, jnp.int32)[None], view, *words)
