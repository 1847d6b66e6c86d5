"""How the arrays of a leaf are cut into chunks."""

import jax
import pytest

from optax_mp.leafwise._chunks import cuts_of
from optax_mp.leafwise._evaluator import Part


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
    cuts = cuts_of(part_of(shape))
    for dtype in ("float32", "bfloat16"):
        assert cuts.can_leave_host(jax.ShapeDtypeStruct(shape, dtype)) == can
    pass
    scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 32), "float32")
    assert not cuts.can_leave_host(scales)
