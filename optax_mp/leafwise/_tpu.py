"""Run the elementwise end of a step in one Pallas kernel on a TPU."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_mp._jax._arrays import result_like
from optax_mp.leafwise._cut import End
from optax_mp.leafwise._kernel_part import DTYPES, has_dtypes, hold
from optax_mp.leafwise._part import Piece
from optax_mp.leafwise._program import Program, Value, read
from optax_mp.leafwise._tile import LANES, Tile

_ROWS = 32  # Mosaic's tiles of 8-bit numbers are 32 x 128.
_CHUNK = 512


def takes(program: Program, end: End, piece: Piece) -> bool:
    """Return whether Mosaic has what an end needs."""
    if not has_dtypes(program, end, DTYPES - {"float16"}):
        return False
    if any(v.aval.ndim and v.aval.dtype == jnp.bool_ for v in end.reads):
        return False
    has_lanes = end.block_size is None or 8 <= end.block_size <= LANES
    return len(piece.shape) > 1 and has_lanes


def run_end(
    program: Program,
    end: End,
    piece: Piece,
    args: Sequence[Any],
    interpret: bool = False,
) -> list[Any]:
    """Return the outputs of an end.

    Args:
        program: the program that the end is of.
        end: the end.
        piece: of its arrays.
        args: the values of what it reads.
        interpret: whether to run the kernel without a TPU.
    """
    shape, block_size = piece.shape, end.block_size or 32
    *leading, height, width = shape
    rows = min(_ROWS, height)
    # As many columns as 128 scales are for, since those fill a register's lanes.
    columns = min(block_size * LANES, _round_up(width, LANES))
    chunk = math.gcd(columns, _CHUNK)
    tile_scales = _round_up(columns // block_size, LANES)
    scalars = [i for i, v in enumerate(end.reads) if not v.aval.ndim]
    arrays = [i for i, v in enumerate(end.reads) if v.aval.ndim]
    outputs = [program.outputs[i] for i in end.outputs]

    def is_scales(value: Value) -> bool:
        return value.aval.shape != piece.whole

    def spec(value: Value) -> pl.BlockSpec:
        tile = (rows, tile_scales if is_scales(value) else columns)
        return pl.BlockSpec((*[None] * len(leading), *tile), lambda *at: at)

    def kernel(*refs: Any) -> None:
        places, refs = refs[: len(shape)], refs[len(shape) :]
        given, made = refs[: len(end.reads)], refs[len(end.reads) :]
        here = replace(piece, origin=tuple(ref[0] for ref in places))
        ids = [pl.program_id(axis) for axis in range(len(shape))]
        origin = (*ids[:-2], ids[-2] * rows, ids[-1] * columns)
        known: dict[Value, Any] = {}
        for i, ref in zip(scalars, given, strict=False):
            known[end.reads[i]] = _from_32_bits(ref[0], end.reads[i].aval.dtype)
        of_arrays = dict(zip(arrays, given[len(scalars) :], strict=True))
        for i, ref in of_arrays.items():
            if is_scales(end.reads[i]):
                known[end.reads[i]] = hold(ref[...])

        def run_chunk(k: Any, scales: Sequence[Any]) -> Sequence[Any]:
            first = pl.multiple_of(k * chunk, chunk)
            tile = Tile(here, rows, chunk, block_size, tile_scales, origin, first)
            local = dict(known)
            for i, ref in of_arrays.items():
                if not is_scales(end.reads[i]):
                    local[end.reads[i]] = hold(ref[:, pl.ds(first, chunk)])
            for place in end.places:
                node = program.nodes[place]
                inputs = [read(local, x) for x in node.inputs]
                local.update(zip(node.outputs, tile.run(node, inputs), strict=True))
            scales = list(scales)
            for i, (value, ref) in enumerate(zip(outputs, made, strict=True)):
                result = local[value]
                if is_scales(value):
                    scales[i] = jnp.where(tile.is_of_chunk(), result, scales[i])
                else:
                    ref[:, pl.ds(first, chunk)] = result.astype(ref.dtype)
            return tuple(scales)

        empty = tuple(
            jnp.zeros((rows, tile_scales), jnp.float32) if is_scales(v) else 0
            for v in outputs
        )
        scales = lax.fori_loop(0, columns // chunk, run_chunk, empty)
        for value, ref, result in zip(outputs, made, scales, strict=True):
            if is_scales(value):
                ref[...] = result.astype(ref.dtype)

    in_order = [*range(-len(shape), 0), *scalars, *arrays]
    alias = {in_order.index(read_at): out for out, read_at in end.replaced.items()}
    numbers = [pl.BlockSpec(memory_space=pltpu.SMEM)] * (len(shape) + len(scalars))
    return pl.pallas_call(
        kernel,
        grid=(*leading, pl.cdiv(height, rows), pl.cdiv(width, columns)),
        in_specs=numbers + [spec(end.reads[i]) for i in arrays],
        out_specs=[spec(value) for value in outputs],
        out_shape=[result_like(v.aval, piece.shape_of(v.aval.shape)) for v in outputs],
        input_output_aliases=alias,
        interpret=interpret,
    )(
        *map(_as_32_bits, piece.origin),
        *[_as_32_bits(args[i]) for i in scalars],
        *[args[i] for i in arrays],
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _as_32_bits(x: Any) -> jax.Array:
    """Return a scalar as an array of one number that a kernel takes."""
    x = jnp.asarray(x).reshape(1)
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.int32)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32 if is_float else jnp.int32)


def _from_32_bits(x: Any, dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return x != 0
    return lax.bitcast_convert_type(x, jnp.uint32) if dtype == jnp.uint32 else x
