"""Codes and scales of a low-bit array, against a quantizer in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import as_bits
from reference import code_sizes, line_codes, line_scales, line_values, whole_lines

from optax_mp.compact._codes import decode, encode, zeros_in
from optax_mp.compact._quantized import Code, choose_lines
from optax_mp.core._random_numbers import rounding_keys

EVERY_DTYPE = pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
# Each rounding with a signed and an unsigned dtype, and with either width.
ROUNDINGS = pytest.mark.parametrize(
    ("dtype", "at_random"),
    [("int8", True), ("uint8", False), ("int16", False), ("uint16", True)],
)


def rounding_key(*parts):
    return rounding_keys(1, *parts)[0]


def zeros_like(x, dtype):
    return zeros_in(Code(dtype, *choose_lines(x.shape)), x)


def encoded(x, dtype, key=None):
    return encode(x, zeros_like(x, dtype), key)


decoded = jax.jit(decode)


def values(shape, dtype="int8", size=1.0):
    """Return random float32 values over seven decades, with sign if codes have one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-6, 1, shape) * size
    return (np.abs(x) if dtype.startswith("u") else x).astype(np.float32)


# What models have, and what they should not: each shape with that of its scales.
LINES = {
    (2880, 2880): (2880, 1),
    (50257, 768): (50257, 1),  # an embedding: a line for each token
    (768, 50257): (1, 50257),  # a head: also
    (768, 6144): (768, 1),  # not more than 8 times longer
    (257, 1001): (257, 1),
    (24, 2048, 8192): (24, 2048, 1),  # layers
    (8, 128, 4096): (8, 1, 4096),
    (24, 1024): (24, 1),  # stacked norms: a line for each layer
    (16, 64, 1024): (16, 64, 1),  # attention
    (8, 8192): (8, 1),
    (8, 50257): (8, 197),  # a few rows that are longer
    (2, 200): (2, 1),
    (4096, 8): (1, 8),  # adapters of a low rank
    (16, 15): (1, 15),
    (1024, 16, 4): (1024, 1, 4),  # small heads
    (1024, 8, 4): (1024, 1, 1),
    (3, 3, 64, 1): (3, 3, 1, 1),  # kernels of convolutions
    (3, 3, 3, 64): (3, 3, 3, 1),
    (64, 1, 3, 3): (1, 1, 1, 1),
    (3, 3): (1, 1),
    (5000,): (20,),
    (256,): (1,),
    (1,): (1,),
}


@pytest.mark.parametrize("shape", LINES, ids=str)
def test_each_line_of_a_shape_has_a_scale(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    zeros = jax.eval_shape(lambda: zeros_like(x, "int8"))
    assert zeros.scales.shape == LINES[shape]
    assert (zeros.codes.shape, zeros.scales.dtype) == (shape, jnp.bfloat16)


# Lines along the last axis, the one before, several; groups, of which the last is short.
LAYOUTS = [(40, 64), (2, 16, 200), (9, 8, 3), (900,)]


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@EVERY_DTYPE
def test_codes_and_scales_are_those_of_the_reference(dtype, shape):
    x = values(shape, dtype)
    got = jax.device_get(encoded(x, dtype))
    scales = line_scales(x, got.scales.shape)
    assert as_bits(got.scales) == as_bits(scales)
    want = line_codes(x, scales, dtype)
    assert (got.codes.dtype, got.codes.shape) == (want.dtype, want.shape)
    # Float32 against float64: a root next to the middle of two codes may fall either
    # way. A root is off by 2^-24 of itself or so: for one of 2^16 / 2^24 values or so.
    off = np.abs(got.codes.astype(int) - want.astype(int))
    assert off.max() <= 1
    assert off.mean() <= (0.02 if "16" in dtype else 1e-3)
    # A code's multiple of a unit has two roundings, eight times in its eighth power, and
    # three squares and a product have half a unit each: 7e-7 at most.
    back = np.asarray(decoded(got))
    np.testing.assert_allclose(back, line_values(got.codes, scales, dtype), rtol=1e-6)


@EVERY_DTYPE
def test_rounding_at_random_is_to_a_neighbour_and_right_on_average(dtype):
    """Of 64 values, 4000 independent roundings each; seeds are fixed."""
    x, count = values((64,), dtype), 4000
    scales = line_scales(x, (1,))
    exact = code_sizes(x, scales, dtype)
    low, high = np.floor(exact), np.minimum(np.floor(exact) + 1, np.iinfo(dtype).max)
    keys = jax.vmap(rounding_key)(jnp.arange(count))
    draw = jax.jit(jax.vmap(lambda key: (q := encoded(x, dtype, key), decode(q))))
    made, back = jax.device_get(draw(keys))
    # In float32 a root of 16 bits is known to 2^-8 of a code.
    room = (exact - low < 2.0**-6) * 1.0 if "16" in dtype else 0
    codes = np.abs(made.codes.astype(int))
    assert (codes >= low - room).all() and (codes <= high + room).all()
    ends = [line_values(np.copysign(c, x), scales, dtype) for c in (low, high)]
    gap = np.abs(ends[1] - ends[0])
    rest = np.abs(x - ends[0]) / np.where(gap == 0, 1, gap)
    # Five standard errors, one rounding more for what is next to a code, and float32.
    error = 5 * gap * (np.sqrt(rest * (1 - rest) / count) + 1 / count)
    error += 1e-6 * np.abs(x)
    assert (np.abs(back.astype(np.float64).mean(0) - x) <= error).all()


def zeros_and_tiny_values(shape):
    """Return values over 30 decades, a line of 1e-30 and less, and zeros."""
    x = np.geomspace(1e-30, 1, np.prod(shape), dtype=np.float32)
    x = np.random.default_rng(0).permutation(x).reshape(shape)
    x[3] *= 1e-30 / x[3].max()
    x[:, ::7] = x[5] = 0
    return x


@pytest.mark.parametrize("at_random", [False, True])
@EVERY_DTYPE
def test_unsigned_codes_keep_positive_values_above_0_and_signed_ones_fade(
    dtype, at_random
):
    """Optimizers divide by the root of the first. Of normal numbers: not under 2^-126."""
    x = zeros_and_tiny_values((40, 64))
    key = rounding_key(1) if at_random else None
    got = encoded(x, dtype, key)
    back = np.asarray(decoded(got))
    if dtype.startswith("u"):
        is_normal = x >= 2.0**-126
        assert (x[3] >= 2.0**-126).sum() > 9  # also there
        assert (back[is_normal] >= 2.0**-126).all() and (back[x == 0] == 0).all()
    else:
        assert (got.codes == 0).sum() > (x == 0).sum() + 200
        mirrored = encoded(-x, dtype, key)
        np.testing.assert_array_equal(mirrored.codes, -got.codes)
        assert (back >= 0).all() and (back[x == 0] == 0).all()


@pytest.mark.parametrize("size", [1e-15, 1e30, 3e38])
@EVERY_DTYPE
def test_the_largest_of_a_line_is_as_exact_at_any_size(dtype, size):
    """float16 scales would be 0 under 6e-8. From 2^125 on it saturates."""
    x = np.full((40, 64), size, np.float32)
    x[:, 1:] = 0
    got = encoded(x, dtype)
    # A scale is up to 2^-7 larger, and codes of 8 bits are 2^-5 apart.
    want = min(x[0, 0], 2.0**125)
    np.testing.assert_allclose(decoded(got)[:, 0], want, rtol=2.0**-6)


NAN_OF_X86 = np.array(0xFFC00000, np.uint32).view(np.float32)  # of inf - inf


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@ROUNDINGS
def test_what_is_not_finite_makes_its_line_nan_and_no_other(shape, dtype, at_random):
    x = values(shape, dtype)
    bad = np.zeros(encoded(x, dtype).scales.shape, bool)
    for place, value in zip((3, -1, 160), (np.nan, np.inf, NAN_OF_X86), strict=True):
        place %= x.size
        x.flat[place] = value
        numbers = whole_lines(x, np.arange(bad.size).reshape(bad.shape))
        bad.flat[numbers.flat[place]] = True
    back = np.asarray(
        decoded(encoded(x, dtype, rounding_key(1) if at_random else None))
    )
    assert not bad.all()
    np.testing.assert_array_equal(np.isnan(back), whole_lines(x, bad))
    assert not np.isinf(back).any()


@EVERY_DTYPE
def test_nearest_codes_stay_where_they_are(dtype):
    """Encoding again and again, as the state of a skipped step is."""
    first = encoded(values((40, 64), dtype), dtype)
    second = encoded(decoded(first), dtype)
    # A line's largest may be under its scale, by a code, and then gives a smaller one.
    third = encoded(decoded(second), dtype)
    assert as_bits(third) == as_bits(encoded(decoded(third), dtype))
    # Less than the distance of two codes, 3% to 8%.
    np.testing.assert_allclose(decoded(third), decoded(first), rtol=0.02, atol=0)


def test_values_that_are_codes_stay_at_random_too():
    """Else a moment that does not change would wander."""
    for dtype in ("int8", "uint8"):
        codes = np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1)[-255:]
        x = line_values(codes, np.ones((1,), jnp.bfloat16), dtype).astype(np.float32)
        for seed in range(5):
            got = encoded(x, dtype, rounding_key(seed))
            # The root in float32 is off by up to 2^-22 of a code's place.
            off = np.asarray(got.codes, int) - codes
            assert np.abs(off).max() <= 1 and (off != 0).mean() < 0.02
