"""Run the elementwise end of a step in one Pallas kernel on a GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from optax_mp._jax._contact import result_like
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._kernel_evaluator import (
    DTYPES,
    KernelEvaluator,
    aliases,
    as_read,
    hold,
    other_dtype,
)
from optax_mp.leafwise._program import Value

# Elements of a part, and warps of 32 threads for it. Eight elements for each thread:
# with sixteen, XLA takes twice as long to compile a kernel.
_COUNT, _WARPS = 2048, 8


@dataclass(frozen=True)
class RunEvaluator(KernelEvaluator):
    """A run of elements, in the order of memory, and their scales.

    Attributes:
        count: of elements.
        first: the place of the first element in memory.
    """

    count: int
    first: Any

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the run of an array."""
        is_element = shape == self.part.whole
        return (self.count if is_element else self.count // self.part.block_size,)

    def index(self, axis: int) -> jax.Array:
        """Return the indices in the whole array along an axis of the part."""
        shape = self.part.shape
        # From the place in memory, where the last axis runs fastest.
        at = lax.broadcasted_iota(jnp.int32, (self.count,), 0) + self.first
        at = lax.div(at, jnp.int32(math.prod(shape[axis + 1 :])))
        at = at if not axis else lax.rem(at, jnp.int32(shape[axis]))
        return at + self.part.origin[axis]

    def spread(self, scales: jax.Array) -> jax.Array:
        """Return for each element the scale of its block."""
        shape = (self.count // self.part.block_size, self.part.block_size)
        return jnp.broadcast_to(scales[:, None], shape).reshape(self.count)

    def largest(self, values: jax.Array) -> jax.Array:
        """Return the largest value of each block."""
        # Unlike a TPU's lanes, the threads of a GPU exchange values freely: Triton
        # reshapes to blocks, and reduces these.
        return jnp.max(values.reshape(-1, self.part.block_size), axis=1)


def obstacle(end: End, part: Part) -> str | None:
    """Return why the kernel cannot compute an end; None if it can."""
    other = other_dtype(end, DTYPES)
    if other is not None:
        return f"computes in {other}"
    size = end.block_size or 1
    if _COUNT % size:
        return f"blocks of {size}"
    if part.shape[-1] % size:
        return "rows not of whole blocks"
    if math.prod(part.shape) >= 2**31:
        return "2^31 elements or more"
    return None


def run_end(
    end: End, part: Part, args: Sequence[Any], interpret: bool = False
) -> list[Any]:
    """Return the outputs of an end.

    Args:
        end: the end.
        part: of its arrays.
        args: the values of what it reads.
        interpret: whether to run the kernel without a GPU.
    """
    # Arrays are seen as one row, in the order of memory: rows of whole blocks follow
    # each other without a gap, so the scales of a run of elements are a run, too. Each
    # program of the grid takes one run; the last one is masked.
    size = math.prod(part.shape)

    def kernel(*refs: Any) -> None:
        places, refs = refs[: len(part.shape)], refs[len(part.shape) :]
        here = replace(part, origin=tuple(ref[0] for ref in places))
        first = pl.program_id(0) * _COUNT
        run = RunEvaluator(here, _COUNT, first)

        def places_of(value: Value) -> tuple[Any, Any]:
            (count,) = run.shape_of(value.aval.shape)
            start = pl.program_id(0) * count
            at = lax.broadcasted_iota(jnp.int32, (count,), 0) + start
            is_inside = at < math.prod(part.shape_of(value.aval.shape))
            return pl.ds(start, count), None if size % _COUNT == 0 else is_inside

        values: dict[Value, Any] = {}
        for value, ref in zip(end.reads, refs, strict=False):
            if value.aval.ndim:
                at, inside = places_of(value)
                other = None if inside is None else 0
                read = triton.load(ref.at[at], mask=inside, other=other)
            else:
                read = ref[0]
            values[value] = hold(read, value.aval.dtype)
        run.run_all(end, values)
        for value, ref in zip(end.outputs, refs[len(end.reads) :], strict=True):
            at, inside = places_of(value)
            triton.store(
                ref.at[at], values[value].astype(value.aval.dtype), mask=inside
            )

    flat = [
        as_read(jnp.reshape(x, -1)) for x in map(jnp.asarray, [*part.origin, *args])
    ]
    rank = len(part.shape)
    made_shapes = [(v, part.shape_of(v.aval.shape)) for v in end.outputs]
    params = None if interpret else triton.CompilerParams(num_warps=_WARPS)
    made = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(size, _COUNT),),
        out_shape=[
            result_like(v.aval, (math.prod(shape),)) for v, shape in made_shapes
        ],
        input_output_aliases={rank + at: out for at, out in aliases(end).items()},
        interpret=interpret,
        compiler_params=params,
    )(*flat)
    return [x.reshape(s) for x, (_, s) in zip(made, made_shapes, strict=True)]
