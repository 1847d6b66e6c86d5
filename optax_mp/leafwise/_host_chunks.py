"""Run the elementwise end of a step chunk by chunk, each brought from host memory.

`_chunks` cuts otherwise: it views all axes but the last as one of rows, which can be a
copy of all of an array in host memory. Here an array is cut as it is, whatever its
shape, and no other device has a part of it. The caller says how large a chunk may be.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._memory import (
    is_host_type,
    moves_memory,
    to_device,
    to_host,
)
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._evaluator import Part, PartEvaluator
from optax_mp.leafwise._program import Node, Program, Value

_TILE = 32  # rows of the tiles in which a TPU keeps numbers of 8 bits


@dataclass(frozen=True)
class Chunks:
    """Chunks of a part, all of one shape: some rows each.

    Attributes:
        shape: of the part.
        axis: the axis of which each has some indices. Of the axes before it each has
            one, of those after it all.
        first: the first index along the axis.
        per_row: how many there are along the axis.
        count: how many there are.
    """

    shape: tuple[int, ...]
    axis: int
    first: int
    per_row: int
    count: int

    def start(self, k: Any, shape: tuple[int, ...]) -> list[Any]:
        """Return the indices of the first element of chunk `k` of such an array."""
        row, at = (k, 0) if self.per_row == 1 else divmod(k, self.per_row)
        indices = jnp.unravel_index(row, shape[: self.axis]) if self.axis else ()
        along = at * self.shape[self.axis] + self.first
        found = [*indices, along, *[0] * (len(shape) - self.axis - 1)]
        return [jnp.asarray(index, jnp.int32) for index in found]


def chunks_of(
    shape: tuple[int, ...], block_size: int, most_elements: int
) -> Iterator[Chunks]:
    """Yield chunks of up to this many elements, and those of what is left over.

    There are at least two if that can be: for TPUs some versions of XLA fail to compile
    a copy of all of an array of 8 bits.
    """
    most_elements = min(most_elements, math.prod(shape) // 2)
    sizes = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    fits = [axis for axis, size in enumerate(sizes) if size <= most_elements]
    axis = fits[0] if fits else len(shape) - 1
    is_last = axis == len(shape) - 1
    length = _good_length(
        min(shape[axis], max(1, most_elements // sizes[axis])),
        shape[axis],
        block_size if is_last else _TILE,
        is_last,
    )
    rows = math.prod(shape[:axis])
    whole, left = divmod(shape[axis], length)
    for first, some, per_row in ((0, length, whole), (whole * length, left, 1)):
        if some:
            part = (*[1] * axis, some, *shape[axis + 1 :])
            yield Chunks(part, axis, first, per_row, rows * per_row)


def _good_length(most: int, whole: int, multiple: int, is_strict: bool) -> int:
    """Return a length that divides the whole if there is one, else a multiple."""
    if most >= whole:
        return whole
    step = multiple if is_strict or most >= multiple else 1
    most = max(step, most - most % step)
    found = (n for n in range(most, most // 2, -step) if whole % n == 0)
    return next(found, most)


def bytes_on_device(aval: Any) -> int:
    """Return how many bytes an array takes that is brought to the device.

    Codes of few bits become numbers of 32 bits there.
    """
    return aval.size * max(4, aval.dtype.itemsize)


def _bytes_per_element(end: End) -> int:
    """Return how many bytes the arrays in host memory take for one element."""
    found = [x.aval for x in end.reads if is_host_type(x.aval)]
    sizes = [bytes_on_device(x) // x.size for x in found if x.shape == end.shape]
    return max(4, sum(sizes))


class _Chunk(PartEvaluator):
    """A chunk of a part that is on the device, with all that is made of it."""

    def run(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of an elementwise equation for this part."""
        if moves_memory(node.equation):
            return list(inputs)
        return super().run(node, inputs)


def run_chunks(
    program: Program,
    end: End,
    part: Part,
    args: Sequence[Any],
    *,
    rounds: Any,
    fills: Sequence[Any],
    chunk_bytes: int,
) -> list[Any]:
    """Return the outputs of an end; those that replace an input overwrite it.

    Args:
        program: the program that the end is of.
        end: the end, which has parts.
        part: of its arrays.
        args: the values of what it reads.
        rounds: 1, or 0 to leave everything as it is.
        fills: what the outputs that replace nothing are if everything is left.
        chunk_bytes: how many bytes the arrays in host memory may take on the device.
    """
    outputs = [program.outputs[i] for i in end.outputs]
    results = [
        args[end.replaced[i]]
        if i in end.replaced
        else start_value(value.aval, part.shape_of(value.aval.shape), fills[i])
        for i, value in enumerate(outputs)
    ]
    slot_of = {read: i for i, read in end.replaced.items()}
    most = max(1, chunk_bytes // _bytes_per_element(end))
    for chunks in chunks_of(part.shape, part.block_size, most):

        def run_chunk(k: Any, results: Any, chunks: Chunks = chunks) -> list[Any]:
            start = chunks.start(k, part.shape)
            origin = tuple(a + b for a, b in zip(part.origin, start, strict=True))
            evaluator = _Chunk(replace(part, shape=chunks.shape, origin=origin))

            def start_of(value: Value) -> list[Any]:
                if value.aval.shape == part.whole:
                    return start
                block = lax.div(start[-1], jnp.int32(part.block_size))
                return [*start[:-1], block]

            known = dict(zip(end.reads, args, strict=True))
            arrays = {}
            for i, value in enumerate(end.reads):
                if value.aval.ndim:
                    source = results[slot_of[i]] if i in slot_of else args[i]
                    shape = evaluator.shape_of(value.aval.shape)
                    array = lax.dynamic_slice(source, start_of(value), shape)
                    is_brought = is_host_type(value.aval)
                    arrays[i] = to_device(array) if is_brought else array
            # Apart from what reads and writes the arrays, XLA for CPUs compiles this as
            # it does without chunks, to the same bits. (Not the numbers: where each is
            # used once, XLA makes divisions by them products.)
            for i, array in lax.optimization_barrier(arrays).items():
                known[end.reads[i]] = array
            evaluator.run_all(program, end, known)
            made = lax.optimization_barrier([known[value] for value in outputs])
            made = [
                to_host(x) if is_host_type(v.aval) else x
                for v, x in zip(outputs, made, strict=True)
            ]
            return [
                lax.dynamic_update_slice(result, array, start_of(value))
                for value, result, array in zip(outputs, results, made, strict=True)
            ]

        results = lax.fori_loop(jnp.int32(0), rounds * chunks.count, run_chunk, results)
    return results


def start_value(aval: Any, shape: tuple[int, ...], fill: Any) -> jax.Array:
    """Return an array to be overwritten, of a type but for the shape."""
    array = jnp.full(shape, fill, aval.dtype)
    return to_host(array) if is_host_type(aval) else array
