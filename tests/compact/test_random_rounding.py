"""Random numbers from a hash, and stochastic rounding to 16-bit floats."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from optax_mp.compact._rounding import round_stochastically
from optax_mp.core._random_numbers import rounding_keys, uniform_numbers

BOTH = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
round_jitted = jax.jit(round_stochastically, static_argnums=1)


def rounding_key(*parts):
    return rounding_keys(1, *parts)[0][0]


def neighbours(x, dtype):
    """Return the largest value of `dtype` not over x, and the least not under it."""
    nearest = x.astype(dtype)
    exact = nearest.astype(np.float64) == x
    # ml_dtypes has nextafter for its own types.
    up = np.nextafter(nearest, np.array(np.inf, dtype))
    down = np.nextafter(nearest, np.array(-np.inf, dtype))
    over = nearest.astype(np.float64) > x
    below = np.where(over, down, nearest).astype(np.float64)
    above = np.where(over | exact, nearest, up).astype(np.float64)
    return below, above


def sample(dtype, count=4096):
    """Return float32 values over the range of `dtype`, subnormals and exact ones too."""
    rng = np.random.default_rng(0)
    lowest = -24 if dtype == "float16" else -120
    x = rng.choice([-1, 1], count) * 2.0 ** rng.uniform(lowest, 15, count)
    x[: count // 8] = x[: count // 8].astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )
    return x.astype(np.float32)


def rows_of(keys, shape):
    """Return the random numbers of an array for each key, as rows."""
    rows = jax.vmap(lambda key: uniform_numbers(shape, key).ravel())(keys)
    return np.asarray(rows, np.float64)


def test_random_numbers_are_uniform_and_uncorrelated():
    """Bounds: 5 standard errors, seeds fixed."""
    count = 2**16
    of_steps = jax.vmap(lambda step: rounding_key(0, 1, step))(jnp.arange(8))
    parts = (1, 0, 3), (-1, 7, 2**31), (2**32 + 5, 3)
    others = jnp.stack([rounding_key(*each) for each in parts])
    keys = jnp.concatenate([of_steps, others, *rounding_keys(5, 0, 3)[2:]])
    rows = rows_of(keys, (256, 256))
    for row in rows:
        assert 0 <= row.min() and row.max() < 1
        shares = np.histogram(row, 64, (0, 1))[0] / count
        assert np.abs(shares - 1 / 64).max() < 5 * np.sqrt(1 / 64 / count)
        # Of neighbours in the last axis and, in rows of 256, in the one before.
        for lag in (1, 2, 16, 256):
            assert abs(np.corrcoef(row[lag:], row[:-lag])[0, 1]) < 5 / np.sqrt(count)
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / np.sqrt(count)


def test_the_numbers_of_a_seed_stay_the_same():
    """A run that is resumed with a newer version goes on with the same bits."""
    keys = [int(key[0]) for key in rounding_keys(2, 1, 2)]
    assert keys == [2677701105, 1774146086]


def test_random_numbers_at_one_place_are_uniform_over_the_steps():
    """What makes the average over a training run right, at every place."""
    steps, places = 4000, 64
    keys = jax.vmap(lambda step: rounding_key(0, 2, step))(jnp.arange(steps))
    rows = rows_of(keys, (places,))
    assert np.abs(rows.mean(0) - 0.5).max() < 5 * np.sqrt(1 / 12 / steps)
    lagged = [np.corrcoef(r[1:], r[:-1])[0, 1] for r in rows.T]
    assert np.abs(lagged).max() < 5 / np.sqrt(steps)


@BOTH
def test_a_value_becomes_one_of_its_two_neighbours(dtype):
    x = sample(dtype)
    low = jnp.dtype(dtype)
    below, above = neighbours(x.astype(np.float64), low)
    for step in range(5):
        got = round_jitted(x, dtype, rounding_key(0, step))
        assert got.dtype == jnp.float32
        got = np.asarray(got, np.float64)
        assert ((got == below) | (got == above)).all()
        # Cast down it is exact.
        np.testing.assert_array_equal(got, got.astype(low).astype(np.float64))


@BOTH
def test_the_mean_of_many_roundings_is_the_value(dtype):
    """5 standard errors of `count` independent roundings; all seeds are fixed."""
    x, count = sample(dtype, 512), 4000
    keys = jax.vmap(lambda step: rounding_key(1, 0, step))(jnp.arange(count))
    draw = jax.jit(jax.vmap(functools.partial(round_stochastically, x, dtype)))
    got = np.asarray(draw(keys), np.float64)
    below, above = neighbours(x.astype(np.float64), jnp.dtype(dtype))
    rest = (x - below) / np.where(above == below, 1, above - below)
    error = np.sqrt(rest * (1 - rest) / count) + 1 / count
    assert (np.abs(got.mean(0) - x) <= 5 * error * (above - below)).all()


@BOTH
def test_values_of_the_dtype_stay(dtype):
    patterns = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    x = patterns.astype(np.float32)
    x = x[np.isfinite(x)]
    if dtype == "bfloat16":
        x = x[(x == 0) | (np.abs(x) >= 2.0**-126)]  # CPUs see zero in smaller ones
    got = np.asarray(round_jitted(x, dtype, rounding_key(4)))
    np.testing.assert_array_equal(got, x)


@BOTH
def test_too_large_values_become_the_largest_and_infinity_and_nan_stay(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, np.nan, -np.nan], np.float32)
    for step in range(20):
        got = np.asarray(round_jitted(x, dtype, rounding_key(step)))
        np.testing.assert_array_equal(
            got, [np.inf, -np.inf, largest, -largest, np.nan, np.nan]
        )
