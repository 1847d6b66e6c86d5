"""Codes and scales, against a block quantizer in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import as_bits
from reference import (
    block_codes,
    block_layout,
    block_scales,
    block_share,
    block_values,
    column_shifts,
    shift_layout,
)

from optax_mp.compact import _blocks
from optax_mp.compact._blocks import choose_blocks, choose_group, dequantize, quantize
from optax_mp.compact._random_numbers import rounding_keys
from optax_mp.trees._quantized import Code

EVERY_FORM = pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
# Each rounding with a signed and an unsigned dtype, and with either width.
ROUNDINGS = [("int8", True), ("uint8", False), ("int16", False), ("uint16", True)]


def rounding_key(*parts):
    return rounding_keys(1, *parts)[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def quantized_zeros(x, dtype, block_size=None, stays_positive=None, shifts=False):
    blocks = (-1, None) if block_size is None else choose_blocks(x.shape, block_size)
    group = choose_group(x.shape, blocks[0]) if shifts else None
    name = str(jnp.dtype(dtype))
    stays_positive = is_unsigned(name) if stays_positive is None else stays_positive
    return _blocks.quantized_zeros(x, Code(name, *blocks, stays_positive, group))


def encode(x, dtype, block_size=32, key=None, stays_positive=None, shifts=False):
    like = quantized_zeros(x, dtype, block_size, stays_positive, shifts)
    return quantize(x, like, key)


decode = jax.jit(dequantize)


def values(shape, dtype="int8", seed=0, scale=1.0):
    """Return random float32 values of many sizes, with sign if the codes have one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-6, 1, shape) * scale
    x = np.abs(x) if dtype.startswith("u") else x
    return x.astype(np.float32)


def is_unsigned(dtype):
    return dtype.startswith("u")


def worst_error(x, scale, dtype, spread=0.5):
    """Return how far a decoded value may be: a code is `spread` of a gap away.

    Around the share s of the scale the roots are 1 / top apart, so that values are
    2 sqrt(s) / top + 1 / top^2 apart. A few float32 roundings on top. The least positive
    value in unsigned codes is that of code 1.
    """
    top = np.iinfo(dtype).max
    share = block_share(x, scale)
    gap = 2 * np.sqrt(share) / top * spread + (spread / top) ** 2
    if is_unsigned(dtype):
        gap = np.maximum(gap, np.where(x > 0, 1 / top**2, 0))
    return (gap + share * 2.0**-20) * scale


@pytest.mark.parametrize(
    ("shape", "dtype", "block_size"),
    [((3, 3, 40, 2), "int8", size) for size in (1, 4096)]
    + [((40, 64), dtype, 32) for dtype in ("int8", "uint8", "int16", "uint16")]
    + [((101,), "int8", 32), ((4, 264), "uint16", 32), ((7, 7), "uint16", 32)],
    ids=str,
)
def test_codes_and_scales_are_those_of_the_reference(shape, dtype, block_size):
    x = values(shape, dtype)
    got = jax.device_get(encode(x, dtype, block_size))
    scales, each = block_scales(x, block_size)
    assert as_bits(got.scales) == as_bits(scales)
    want = block_codes(x, each, dtype)
    assert (got.codes.dtype, got.codes.shape) == (want.dtype, want.shape)
    # Float32 against float64: a root next to the middle of two codes may fall either
    # way, in about one of 2^24 / 2^16 values with 16 bits.
    off = np.abs(got.codes.astype(int) - want.astype(int))
    assert off.max() <= (1 if "16" in dtype else 0)
    assert off.mean() <= 0.02
    back = np.asarray(decode(got), np.float64)
    np.testing.assert_allclose(back, block_values(got.codes, each), rtol=1e-6)
    assert (np.abs(back - x) <= worst_error(x, each, dtype)).all()


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((50257, 768), (50257, 24)),
        ((24, 2048, 8192), (24, 2048, 256)),
        ((4096, 128), (4096, 8)),  # 16 on each of 8 devices
        ((4096, 96), (128, 96)),
        ((5, 7), (5, 1)),
        ((64, 31), (8, 31)),
        ((2880, 2880), (2880, 360)),
        ((32, 2080), (32, 80)),  # 26, the nearest to 32 that divides 260
        ((32, 264), (32, 8)),
        ((1024, 2056), (1024, 8)),  # 257, which is prime
        ((100,), (4,)),  # 4 devices have 25 each
        ((3,), (1,)),
    ],
    ids=str,
)
def test_blocks_lie_along_the_last_axis_that_is_long_and_are_not_cut(shape, scales):
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    made = jax.eval_shape(lambda: quantized_zeros(like, jnp.int8, 32))
    assert made.scales.shape == scales
    axis, size = block_layout(shape, 32)
    assert scales[axis] == -(-shape[axis] // size)


@EVERY_FORM
@pytest.mark.parametrize("size", [1e-12, 1e-30, 1e-37, 1.0, 1e30])
def test_no_size_of_values_is_lost(size, dtype):
    """float16 scales would be 0 under 6e-8."""
    x = values((40, 64), dtype, scale=size)
    _, each = block_scales(x, 32)
    back = np.asarray(decode(encode(x, dtype)), np.float64)
    # Under 2^-126 CPUs see zero.
    assert (np.abs(back - x) <= worst_error(x, each, dtype) + 2.0**-126).all()
    largest = np.abs(x).max()
    assert abs(np.abs(back).max() / largest - 1) < 0.01


@EVERY_FORM
def test_blocks_of_zeros_stay_and_do_not_touch_others(dtype):
    full = values((40, 256), dtype)
    x = full.copy()
    x[:, 32:] = 0
    got = encode(x, dtype)
    assert (np.asarray(got.scales)[:, 1] == 0).all()
    back = np.asarray(decode(got))
    assert (back[:, 32:] == 0).all()
    assert as_bits(back[:, :32]) == as_bits(
        np.asarray(decode(encode(full, dtype)))[:, :32]
    )


@EVERY_FORM
def test_what_is_over_the_largest_scale_saturates(dtype):
    x = np.full((40, 256), 2.0**20, np.float32)
    x[:, :32] = np.finfo(np.float32).max
    back = np.asarray(decode(encode(x, dtype)))
    assert (back[:, :32] == 2.0**126).all() and (back[:, 32:] == 2.0**20).all()


NAN_OF_X86 = np.array(0xFFC00000, np.uint32).view(np.float32)  # of inf - inf


@pytest.mark.parametrize(("dtype", "stochastic"), ROUNDINGS)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(stochastic, dtype):
    x = values((40, 256), dtype)
    x[1, 40], x[2, 70], x[3, 100] = np.nan, np.inf, NAN_OF_X86
    key = rounding_key(1) if stochastic else None
    is_bad = np.zeros(x.shape, bool)
    is_bad[1, 32:64] = is_bad[2, 64:96] = is_bad[3, 96:128] = True
    back = np.asarray(decode(encode(x, dtype, 32, key)))
    np.testing.assert_array_equal(np.isfinite(back), ~is_bad)
    np.testing.assert_array_equal(np.isnan(back), is_bad)


def zeros_and_positive_values():
    x = np.geomspace(1e-30, 1, 40 * 64, dtype=np.float32)
    x = np.random.default_rng(0).permutation(x).reshape(40, 64)
    x[:, ::7] = 0
    return x


@EVERY_FORM
@pytest.mark.parametrize("stochastic", [False, True])
def test_positive_values_stay_positive_where_roots_are_taken(stochastic, dtype):
    x = zeros_and_positive_values()
    key = rounding_key(1) if stochastic else None
    back = np.asarray(decode(encode(x, dtype, 32, key, True)))
    np.testing.assert_array_equal(back > 0, x > 0)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_others_fade_to_zero_from_either_side(stochastic, dtype):
    x = zeros_and_positive_values()
    key = rounding_key(1) if stochastic else None
    codes = [np.asarray(encode(sign * x, dtype, 32, key).codes) for sign in (1, -1)]
    np.testing.assert_array_equal(codes[0], -codes[1])
    assert (codes[0] == 0).sum() > (x == 0).sum() + 200


@EVERY_FORM
def test_nearest_codes_settle_and_do_not_shrink(dtype):
    """Encoding again and again, as the state of a skipped step is."""
    x = values((40, 64), dtype)
    start = np.asarray(decode(encode(x, dtype)), np.float64)
    back = x
    for _ in range(20):
        before, back = back, decode(encode(back, dtype))
    np.testing.assert_array_equal(before, back)
    _, each = block_scales(x, 32)
    moved = np.abs(np.asarray(back, np.float64) - start)
    assert (moved <= 3 * worst_error(start, each, dtype)).all()


@EVERY_FORM
def test_stochastic_rounding_takes_one_of_two_neighbours(dtype):
    x = values((40, 64), dtype)
    _, each = block_scales(x, 32)
    top = np.iinfo(dtype).max
    exact = np.sqrt(block_share(x, each)) * top
    codes = np.abs(
        np.asarray(encode(x, dtype, 32, rounding_key(3)).codes).astype(np.int64)
    )
    # In float32 a root of 16 bits is known to 2^-8 of a code.
    room = 1e-4 if "8" in dtype else 2.0**-6
    least = np.floor(exact - room)
    if is_unsigned(dtype):
        least = np.maximum(least, 0)
    assert (codes >= least).all()
    assert (codes <= np.maximum(np.ceil(exact + room), x > 0)).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_stochastic_rounding_is_right_on_average(dtype):
    """Seeds are fixed: 5 standard errors of 1000 independent roundings of 64 values."""
    x = values((64,), dtype)
    x[0] = 1.0 if is_unsigned(dtype) else -1.0
    _, each = block_scales(x, 32)
    if is_unsigned(dtype):
        # A smaller one never becomes zero, and is too large on average.
        x = np.maximum(x, 2 * each / np.iinfo(dtype).max ** 2).astype(np.float32)
        _, each = block_scales(x, 32)
    keys = jax.vmap(rounding_key)(jnp.arange(1000))
    draw = jax.jit(jax.vmap(lambda key: dequantize(encode(x, dtype, 32, key))))
    back = np.asarray(draw(keys), np.float64)
    error = 6 * back.std(0) / np.sqrt(len(back)) + 1e-6 * np.abs(x)
    # What is next to a code leaves it in too few of the roundings for a deviation.
    error += worst_error(x, each, dtype, 1.0) * 5 / len(back)
    assert (np.abs(back.mean(0) - x) <= error).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_float_has_no_scales(dtype):
    x = values((40, 33))
    x[0, :2] = [1e30, -1e30]
    form = quantized_zeros(x, jnp.dtype(dtype), None)
    assert form.scales is None
    got = jax.jit(quantize)(x, form, None)
    largest = float(jnp.finfo(dtype).max)
    want = np.clip(x, -largest, largest).astype(jnp.dtype(dtype))
    assert as_bits(got) == as_bits(want)
    assert as_bits(decode(got)) == as_bits(want.astype(np.float32))
    stochastic = jax.jit(quantize)(x, form, rounding_key(1))
    assert stochastic.codes.dtype == jnp.dtype(dtype)
    assert not np.array_equal(stochastic.codes, got.codes)
    once = jax.jit(quantize)(decode(got), form, rounding_key(1))
    np.testing.assert_array_equal(once.codes, got.codes)


def columns(shape, dtype="int8", decades=6):
    """Return random values whose columns are over some decades."""
    x = np.random.default_rng(0).normal(size=shape)
    size = 10.0 ** (-decades * np.random.default_rng(1).random(shape[-1]))
    x = (x * size).astype(np.float32)
    return np.abs(x) if dtype.startswith("u") else x


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128, 160), "int8"),
        ((261, 264), "uint8"),  # a short last group; blocks of 33
        ((2, 256, 128), "int16"),  # layers
    ],
    ids=str,
)
def test_shifts_are_those_of_the_reference(shape, dtype):
    x = columns(shape, dtype)
    x[..., 5:7] *= np.random.default_rng(2).random(x[..., 5:7].shape) < 0.5
    got = jax.device_get(encode(x, dtype, shifts=True))
    shifts, each = column_shifts(x, 32)
    np.testing.assert_array_equal(got.shifts, shifts)
    assert shifts.max() > 10 and shifts.min() == 0
    shifted = np.ldexp(x.astype(np.float64), each).astype(np.float32)
    scales, of_block = block_scales(shifted, 32)
    assert as_bits(got.scales) == as_bits(scales)
    want = block_codes(shifted, of_block, dtype)
    # As in the test without shifts: next to the middle of two codes.
    off = np.abs(got.codes.astype(int) - want.astype(int))
    assert off.max() <= 1 and off.mean() <= (0.02 if "16" in dtype else 1e-3)
    back = np.asarray(decode(got), np.float64)
    values = np.ldexp(block_values(got.codes, of_block), -each)
    np.testing.assert_allclose(back, values, rtol=1e-6)


# As models have them: GPT-2, Llama, Gemma, ResNet, gpt-oss, in layers.
GROUPS = {
    (768, 2304): 32,
    (50257, 768): 128,  # no two devices share it, and the last group is short
    (1600, 6400): 40,
    (262208, 2560): 68,
    (1000, 2048): 125,
    (7, 7, 3, 64): 3,
    (3, 3, 128, 128): 16,
    (24, 2880, 2880): 120,
    (64, 256): 8,
    (4096, 96): 12,  # along the last axis
    (2056, 256): 128,  # nothing else divides
    (2, 4096): 2,  # all rows
    (1, 4096): None,
    (4096,): None,
    (1024, 16, 64): 8,  # along the last axis
}


def test_every_matrix_has_groups_of_rows():
    for shape, group in GROUPS.items():
        axis, _ = choose_blocks(shape, 32)
        assert choose_group(shape, axis) == group, shape
        want = group and (len(shape) - 1 - (axis == -1), group)
        assert shift_layout(shape, 32) == want, shape


def test_columns_of_one_size_keep_their_codes():
    x = np.random.default_rng(0).normal(size=(1024, 256)).astype(np.float32) ** 2
    x[64] *= 1e-9  # a row of another size
    x[77, 77] = 1e6  # a value out of line
    key = rounding_key(1)
    got, plain = (encode(x, "uint16", 32, key, None, on) for on in (True, False))
    assert not got.shifts.any()
    assert as_bits(got[:2]) == as_bits(plain[:2])


@pytest.mark.parametrize(("dtype", "stochastic"), [("uint8", True), ("int16", False)])
def test_no_value_in_shifted_columns_is_lost(stochastic, dtype):
    """Zeros, infinite and NaN ones, the largest and the smallest; each in its block."""
    x = columns((256, 256), dtype, 8)
    clean = x.copy()
    x[:, 3] = 0
    x[1, 40], x[2, 70], x[130, 100] = np.nan, np.inf, np.finfo(np.float32).max
    key = rounding_key(1) if stochastic else None
    back = np.asarray(decode(encode(x, dtype, 32, key, shifts=True)))
    is_bad = np.zeros(x.shape, bool)
    is_bad[1, 32:64] = is_bad[2, 64:96] = True
    np.testing.assert_array_equal(np.isnan(back), is_bad)
    assert (back[:, 3] == 0).all() and back[130, 100] == 2.0**126
    if is_unsigned(dtype):
        ours = ~is_bad & (x > 0)
        ours[128:160, 96:128] = False
        assert (back[ours] > 0).all()
    back = np.asarray(decode(encode(clean, dtype, 32, key, shifts=True)))
    top = np.sort(np.abs(clean), 0)[-8:]  # of each column
    near = np.sort(np.abs(back), 0)[-8:]
    np.testing.assert_allclose(near, top, rtol=0.1 if "8" in dtype else 1e-3)
