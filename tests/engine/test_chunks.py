"""How the arrays of a leaf are cut into chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from host_memory import needs_memories

import optax_mp
from optax_mp.engine._chunks import COUNT, first_chunk
from optax_mp.engine._layout import Part


def part_of(shape, block_size=1):
    return Part(shape, shape, block_size, (0,) * len(shape))


@pytest.mark.parametrize(
    ("shape", "can"),
    [
        ((8192, 4096), True),
        ((32, 2048, 4096), True),
        ((24, 1000, 256), True),  # the leading axis alone
        ((50257, 768), False),  # a tile of less than 8 rows would be left
        ((4096, 1600), False),  # its columns are in the lanes
        ((2**22,), False),
    ],
)
def test_only_whole_tiles_leave_host_memory_in_chunks(shape, can):
    chunk = first_chunk(part_of(shape), COUNT)
    for dtype in ("float32", "bfloat16", "uint8"):
        assert chunk.can_leave_host(jax.ShapeDtypeStruct(shape, dtype)) == can
    scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 32), "float32")
    assert not chunk.can_leave_host(scales)


@pytest.mark.parametrize(
    ("shape", "are_tall"), [((8192, 4096), True), ((24, 1000, 256), False)]
)
def test_tiles_of_codes_are_tall_if_they_divide_the_rows(shape, are_tall, monkeypatch):
    """Without kernels, such codes come as whole leaves."""
    chunk = first_chunk(part_of(shape), COUNT)
    codes = jax.ShapeDtypeStruct(shape, "int8")
    assert chunk.can_leave_host(codes)
    monkeypatch.setenv("OPTAX_MP_KERNELS", "0")
    assert chunk.can_leave_host(codes) != are_tall
    assert chunk.has_tall_tiles(jnp.dtype("int8")) == are_tall
    assert not chunk.has_tall_tiles(jnp.dtype("bfloat16"))


@needs_memories
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_kernel_reads_rows_of_codes(dtype, monkeypatch):
    from optax_mp.engine import _tpu

    # The interpreter knows no host memory, and no writing through words.
    interpreted = functools.partial(_tpu.pl.pallas_call, interpret=True)
    monkeypatch.setattr(_tpu.pl, "pallas_call", interpreted)
    bits = np.random.default_rng(0).integers(0, 256, (256, 128), np.uint8)
    codes = jnp.asarray(bits.view(dtype))
    rows = jax.jit(lambda x, first: _tpu.read_rows(x, first, 64))(codes, 96)
    assert as_bits(rows) == as_bits(codes[96:160])
    again = _tpu.from_words(_tpu.as_words(codes), dtype)
    assert as_bits(again) == as_bits(codes)


def test_no_chunk_starts_where_an_int32_overflows():
    """Without chunks, whose starts are int32: they would overlap, silently."""
    inner = optax_mp.low_bit_state(optax.adam(1e-3))
    tx = optax_mp.mixed_precision(inner, storage=optax_mp.Split(8))
    step = jax.jit(lambda *args: optax_mp.take_step(tx, *args))
    slices = []
    for size in (2**25, 2**31 + 2**20):
        params = {"w": jax.ShapeDtypeStruct((size,), jnp.bfloat16)}
        traced = step.trace(params, tx.init(params), params)
        program = traced.lower(lowering_platforms=("tpu",)).as_text()
        slices.append(program.count("dynamic_slice"))
    assert slices[0] > 0
    assert slices[1] == 0
