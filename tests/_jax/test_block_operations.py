"""Blocks of any axis: held against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_mp._jax._block_operations import Blocks

# Shape, axis and size: whole blocks, a rest, one block, blocks of one, no elements.
CASES = [
    ((64,), 0, 32),
    ((3, 100), 1, 32),
    ((100, 3), 0, 32),
    ((2, 7, 5), 1, 64),
    ((4, 6), 1, 1),
    ((0, 40), 1, 32),
]


def arrays(shape, axis, size):
    rng = np.random.default_rng(0)
    blocks = Blocks(axis, size, shape[axis])
    values = rng.integers(0, 200, shape).astype(np.uint8)
    scales = list(shape)
    scales[axis] = -(-shape[axis] // size)
    assert blocks.count == scales[axis]
    return blocks, values, rng.normal(size=scales).astype(np.float32)


def spread(scales, blocks):
    whole = np.repeat(scales, blocks.size, blocks.axis)
    return np.take(whole, range(blocks.length), blocks.axis)


def largest(values, blocks):
    starts = range(0, blocks.length, blocks.size)
    parts = [
        np.take(values, range(i, min(i + blocks.size, blocks.length)), blocks.axis)
        for i in starts
    ]
    return np.stack([x.max(blocks.axis) for x in parts], blocks.axis)


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks(case, compile):
    blocks, values, scales = arrays(*case)
    got = compile(blocks.spread)(scales)
    assert np.array_equal(got, spread(scales, blocks)) and got.dtype == np.float32
    got = compile(blocks.largest)(values)
    assert np.array_equal(got, largest(values, blocks)) and got.dtype == np.uint8


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_batches(axis):
    blocks, values, scales = arrays((3, 100), 1, 32)
    for run, want, x in (
        (blocks.spread, spread, scales),
        (blocks.largest, largest, values),
    ):
        batch = jnp.stack([x, x[::-1]], axis)
        got = jax.jit(jax.vmap(run, axis))(batch)
        assert np.array_equal(got, [want(x, blocks), want(x[::-1], blocks)])


def test_to_spread_is_linear():
    blocks, _, scales = arrays((3, 100), 1, 32)
    _, tangent = jax.jvp(blocks.spread, (scales,), (scales * 3,))
    assert np.array_equal(tangent, spread(scales * 3, blocks))
    (cotangent,) = jax.vjp(blocks.spread, scales)[1](jnp.ones((3, 100)))
    assert np.array_equal(cotangent, [[32, 32, 32, 4]] * 3)
