"""How the arrays of a leaf are cut into chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_mp.leafwise._chunks import _Chunk, cuts_of
from optax_mp.leafwise._evaluator import Part


def part_of(shape, block_size=1):
    return Part(shape, shape, block_size, (0,) * len(shape))


def chunks_of(cuts):
    for first, length, count in cuts.runs():
        for k in range(count):
            yield _Chunk(cuts, first + k * length, length)


# Rows; rows left over; leading axes that become rows, and such as do not; one axis.
SHAPES = [(256, 96), (200, 300), (4, 64, 128), (5, 10, 128), (2, 3, 40, 8), (2**18,)]


@pytest.mark.parametrize("device_count", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_cover_each_element_once_and_know_where_they_are(shape, device_count):
    cuts = cuts_of(part_of(shape), device_count, most=2**9)
    assert (cuts is None) == (device_count > 1 and (len(shape) != 2))
    if cuts is None:
        return
    seen = np.zeros(cuts.view, int)
    for chunk in chunks_of(cuts):
        seen += np.asarray(
            chunk.put(jnp.zeros(cuts.view, int), jnp.int32(1) + 0 * chunk.index(0))
        )
        for axis in range(len(shape)):
            at = jax.lax.broadcasted_iota(jnp.int32, shape, axis).reshape(cuts.view)
            np.testing.assert_array_equal(chunk.index(axis), chunk.of(at))
    assert (seen == 1).all()


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
    cuts = cuts_of(part_of(shape))
    for dtype in ("float32", "bfloat16"):
        assert cuts.can_leave_host(jax.ShapeDtypeStruct(shape, dtype)) == can
    assert not cuts.can_leave_host(jax.ShapeDtypeStruct(shape, "uint8"))
    scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 32), "float32")
    assert not cuts.can_leave_host(scales)
