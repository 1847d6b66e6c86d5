"""Run the elementwise tail of a step in chunks, from device or host memory.

A TPU needs chunks for two reasons. XLA materializes arrays that it broadcasts or
reduces per block, because blocks of 32 are shorter than the 128 lanes of a
register. Arrays of a chunk's size stay in memory on the chip. And if arrays are in host
memory, only one chunk has to be on the device at a time.

A TPU stores the last two axes of an array in tiles of 8 to 32 rows and 128 lanes. No
tile is cut. XLA copies between memories only slices along one axis, so leading axes are
merged into rows if that keeps the tiles, and else one leading axis is cut. (The lanes
hold columns where rows do not fill them.) A kernel copies chunks of 8-bit codes, whose
tiles XLA would convert in the whole array. Rows that may be sharded are cut within each
shard, so that devices do not exchange chunks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import bits
from optax_mp._jax._arrays import is_host_type, is_on_host, to_device, to_host
from optax_mp._jax._block_operations import Blocks
from optax_mp._jax._experimental import with_major_to_minor
from optax_mp.engine._by_platform import Target, run_by_platform
from optax_mp.engine._evaluator import Evaluator
from optax_mp.engine._kernels import are_on, kernels_for
from optax_mp.engine._layout import Part, shape_in_blocks
from optax_mp.engine._program import Value
from optax_mp.engine._tails import ElementwiseTail

# On a TPU v5e, AdamW's step of as many or twice as many weights stays on the chip; of
# four times as many it does not.
COUNT = 2**20
_ROWS, _SUBLANES, _LANES = 32, 8, 128  # tiles of 8-bit numbers have 32 rows, others 8
_TILE = _SUBLANES * _LANES


@dataclass(frozen=True)
class Chunk(Evaluator):
    """A chunk of the arrays of a part, along one axis of a view of them.

    Attributes:
        view: the shape that its arrays are seen as. The last axis is cut if it is the
            only one.
        axis: the axis that is cut.
        length: how many indices along it a chunk has.
        first: the first of these.
    """

    view: tuple[int, ...]
    axis: int
    length: int
    first: Any = 0

    @classmethod
    def whole(cls, part: Part) -> "Chunk":
        """Return all of a part."""
        view = part.shape if len(part.shape) > 1 else (1, *part.shape)
        return cls(part, view, 0, view[0])

    def view_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the view of the part of an array."""
        return shape_in_blocks(self.view, *self.part.block_of(shape))

    def views(self, values: Sequence[Value], arrays: Sequence[Any]) -> list[Any]:
        """Return the views of arrays of the part; numbers as they are."""
        both = zip((value.aval.shape for value in values), arrays, strict=True)
        return [x.reshape(self.view_of(shape)) if shape else x for shape, x in both]

    def can_leave_host(self, x: jax.Array) -> bool:
        """Return whether XLA for TPUs can copy chunks of an array out of host memory.

        It has no such copy of less than a tile, nor of lanes: arrays with short rows
        have their columns there. Tall tiles need a kernel.
        """
        if x.shape != self.part.shape or len(x.shape) == 1 or bits(x.dtype) < 8:
            return False
        is_one = self.length == self.view[self.axis]
        if is_one or (self.has_tall_tiles(x.dtype) and not are_on()):
            return False
        height, width = self.view[-2:]
        if width % _LANES or height % _SUBLANES:
            return False
        return self.axis < len(self.view) - 2 or self.length % _SUBLANES == 0

    def has_tall_tiles(self, dtype: Any) -> bool:
        """Return whether a TPU stores elements of a dtype in tiles of 32 rows."""
        return bits(dtype) == 8 and self.part.shape[-2] % _ROWS == 0

    def readable(self, x: jax.Array) -> jax.Array:
        """Return an array, on the device unless chunks of it can be copied there."""
        return x if self.can_leave_host(x) else whole_on_device(x)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the chunk of an array."""
        view = list(self.view_of(shape))
        view[self.axis] = self._span(view)[1]
        return tuple(view)

    def _span(self, view: Sequence[int]) -> tuple[Any, int]:
        """Return the start and the length of the chunk in an array of this view."""
        if view[self.axis] == self.view[self.axis]:
            return self.first, self.length
        # Scales or shifts along the axis that is cut.
        size = self.part.block_size if len(view) == 1 else self.part.group_size
        return lax.div(jnp.int32(self.first), jnp.int32(size)), -(-self.length // size)

    def read(self, view: jax.Array) -> jax.Array:
        """Return the chunk of a view of an array, on the device."""
        first, length = self._span(view.shape)
        if not is_on_host(view):
            return lax.dynamic_slice_in_dim(view, first, length, self.axis)

        def read_rows(view: jax.Array, first: Any) -> jax.Array:
            return to_device(lax.dynamic_slice_in_dim(view, first, length, self.axis))

        if self.has_tall_tiles(view.dtype):
            first = jnp.int32(first)
            return _copy_codes(read_rows, "read_rows", view, first, length=length)
        return as_stored(read_rows(view, first))

    def write(self, view: jax.Array, chunk: jax.Array) -> jax.Array:
        """Return a view with another chunk in the place of this one."""
        chunk = chunk.astype(view.dtype)
        first, _ = self._span(view.shape)
        if is_on_host(view) and self.has_tall_tiles(view.dtype):

            def write_rows(view: jax.Array, codes: jax.Array, first: Any) -> jax.Array:
                return lax.dynamic_update_slice_in_dim(view, to_host(codes), first, 0)

            return _copy_codes(write_rows, "write_rows", view, chunk, jnp.int32(first))
        if is_on_host(view):
            chunk = to_host(as_stored(chunk))
        return lax.dynamic_update_slice_in_dim(view, chunk, first, self.axis)

    def index(self, axis: int) -> jax.Array:
        """Return the indices in the whole array along an axis of the part."""
        part, shape = self.part, self.shape_of(self.part.whole)
        column = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        if axis == len(part.shape) - 1:
            start = 0 if axis else self.first
            return column + start + part.origin[axis]
        row = jnp.zeros(shape, jnp.int32)
        for i in range(len(shape) - 1):
            at = lax.broadcasted_iota(jnp.int32, shape, i)
            at = at + self.first if i == self.axis else at
            row += at * math.prod(self.view[i + 1 : -1])
        row = lax.div(row, jnp.int32(math.prod(part.shape[axis + 1 : -1])))
        return lax.rem(row, jnp.int32(part.shape[axis])) + part.origin[axis]

    def spread(self, scales: jax.Array, axis: int) -> jax.Array:
        """Return for each element the scale of its block along an axis, -1 or -2."""
        return self._blocks(axis).spread(scales)

    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        """Return the largest value of each block along an axis, -1 or -2."""
        return self._blocks(axis).largest(values)

    def _blocks(self, axis: int) -> Blocks:
        shape = self.shape_of(self.part.whole)
        size = self.part.block_size if axis == -1 else self.part.group_size
        return Blocks(len(shape) + axis, size, shape[axis])


def first_chunk(part: Part, most: int, device_count: int = 1) -> Chunk | None:
    """Return the first chunk of a part, or None if that is small or does not divide.

    Args:
        part: the part.
        most: up to how many elements of a device a chunk may have.
        device_count: how many devices may hold shards of it.
    """
    # All axes but the last become rows. A chunk is some rows; the last axis is not cut,
    # because blocks lie along it. Nor are groups of rows with common shifts.
    *before, height, width = (1, 1, *part.shape)
    rows, step, axis = math.prod(before) * height, math.lcm(_ROWS, part.group_size), 0
    view: tuple[int, ...] = rows, width
    if device_count > 1 and len(part.shape) != 2:
        return None
    if len(part.shape) == 1:
        # Keep one axis: XLA would copy scales to see them in rows, which would be
        # short. A tile of such an array has 1024 elements, or scales of blocks of 32.
        # The starts of its chunks are int32.
        if part.shape[0] > jnp.iinfo(jnp.int32).max:
            return None
        (rows,), width, view = part.shape, 1, part.shape
        step = max(_TILE * _ROWS, part.block_size)
    elif len(part.shape) > 2 and (height % step or width % _LANES):
        rows, step = math.prod(before), 1
        view, width = (rows, height, width), height * width
    elif device_count > 1:
        # Each device has all groups of an array that is not sharded. (With an axis of
        # one group XLA would copy it.)
        view, axis = (device_count, rows // device_count, width), 1
    length = _good_length(most // (width * device_count), view[axis], step)
    is_even = device_count == 1 or rows % (device_count * part.group_size) == 0
    is_large = rows > device_count * length
    return Chunk(part, view, axis, length) if is_large and is_even else None


def _good_length(most: int, whole: int, step: int) -> int:
    """Return a multiple of `step` that divides the whole if there is one, else any."""
    most = max(step, most - most % step)
    divisors = (n for n in range(most, most // 2, -step) if whole % n == 0)
    return next(divisors, most)


def _copy_codes(
    by_slice: Callable[..., jax.Array], name: str, *args: Any, **settings: Any
) -> jax.Array:
    """Return rows of 8-bit codes in host memory, or the array with other rows.

    XLA for TPUs would convert all of the array for each chunk: in host memory its tiles
    have 32 rows, and tiles of a chunk that XLA copies may have 8.

    Args:
        by_slice: returns it from `args`, on other platforms.
        name: of the same among a TPU's kernels, which are only imported for it.
        *args: arrays.
        **settings: further arguments of the kernel.
    """

    def rewrite(target: Target) -> Any:
        kernels = kernels_for(target) if target.platform == "tpu" else ""
        if isinstance(kernels, str):
            return None
        return lambda values, *_: [getattr(kernels, name)(*values, **settings)]

    return run_by_platform(by_slice, rewrite, *args)


def as_stored(x: jax.Array) -> jax.Array:
    """Return an array in the layout that XLA for TPUs gives it in host memory.

    The lanes hold its rows, or its columns if that needs less padding. In another
    layout, XLA would keep a second copy of the array in host memory. And it cannot copy
    chunks there if it puts the columns of elements into the lanes, as it would because
    of the short rows of scales. Only for TPUs: on other platforms XLA would gather a
    sharded array.
    """
    order = list(range(x.ndim))
    if x.ndim > 1 and _padded(*x.shape[-2:]) > _padded(*x.shape[:-3:-1]):
        order[-2:] = reversed(order[-2:])
    return lax.platform_dependent(
        x, tpu=lambda x: with_major_to_minor(x, tuple(order)), default=lambda x: x
    )


def whole_on_device(x: jax.Array) -> jax.Array:
    """Return an array on the device."""
    return as_stored(to_device(x)) if is_on_host(x) else x


def _padded(height: int, width: int) -> int:
    """Return how many elements the tiles of rows in the lanes have."""
    return -(-height // _SUBLANES) * -(-width // _LANES)


def run_tail(
    tail: ElementwiseTail, first: Chunk, args: Sequence[Any], starts: Sequence[Any] = ()
) -> list[jax.Array]:
    """Return the outputs of a tail.

    Args:
        tail: the tail.
        first: the first chunk of its arrays.
        args: the values that it reads. An array in host memory is copied to the device
            chunk by chunk if that can be, and the array that replaces it is copied
            back.
        starts: the arrays that the outputs overwrite. By default, those among `args`,
            and zeros.
    """
    args, starts = ([first.readable(x) for x in xs] for xs in (args, starts))
    shapes = [first.part.shape_of(value.aval.shape) for value in tail.outputs]
    # The loop carries the results, and each iteration writes its chunk into them: XLA
    # keeps a carry in one buffer. Its first value is the array to be replaced. The loop
    # also reads that array from the carry, or XLA would keep a copy of it.
    old = {at: args[read] for at, read in tail.replaced.items()}
    starts = starts or [
        old[at] if at in old else jnp.zeros(shape, tail.outputs[at].aval.dtype)
        for at, shape in enumerate(shapes)
    ]
    views = dict(zip(tail.reads, first.views(tail.reads, args), strict=True))
    made = first.views(tail.outputs, starts)
    arrays = [value for value in tail.reads if value.aval.ndim]
    is_from_host = any(map(is_on_host, (*args, *starts)))

    def run_chunk(start: int, length: int, k: Any, made: list[Any]) -> list[Any]:
        chunk = replace(first, first=k * length + start, length=length)
        local = views | {tail.reads[i]: made[at] for at, i in tail.replaced.items()}
        # Each array is read once, before any is written: XLA would copy a whole array
        # that several fusions read, in each iteration. The barrier also makes XLA for
        # CPUs compile the equations as it does without chunks, to the same bits.
        # (Scalars stay outside: XLA turns a division by a scalar into a product.)
        read = lax.optimization_barrier([chunk.read(local[x]) for x in arrays])
        for value, array in zip(arrays, read, strict=True):
            local[value] = array.astype(value.aval.dtype)
        chunk.run_all(tail, local)
        results = [local[value] for value in tail.outputs]
        if is_from_host:  # or XLA would compute in host memory
            results = lax.optimization_barrier(results)
        return [chunk.write(x, new) for x, new in zip(made, results, strict=True)]

    count, left_over = divmod(first.view[first.axis], first.length)
    runs = (0, first.length, count), (count * first.length, left_over, 1)
    for start, length, count in runs if left_over else runs[:1]:
        run = partial(run_chunk, start, length)
        made = lax.fori_loop(jnp.int32(0), jnp.int32(count), run, made)
    made = [x.reshape(shape) for x, shape in zip(made, shapes, strict=True)]
    return [
        to_host(as_stored(x)) if is_host_type(v.aval) and not is_on_host(x) else x
        for v, x in zip(tail.outputs, made, strict=True)
    ]
