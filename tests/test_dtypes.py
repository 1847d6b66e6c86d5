"""Names of dtypes, and rounding against ml_dtypes' own casts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bit_claims import FORMATS
from reference import rounded

import optax_mp
from optax_mp.core._dtypes import floating_dtype, round_to, saturating_cast


def interesting_values(dtype):
    """Return all values of `dtype`, their midpoints, and the float32s beside those."""
    size = np.dtype(dtype).itemsize
    codes = np.arange(2 ** (8 * size), dtype=np.uint16 if size == 2 else np.uint8)
    values = codes.view(dtype).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    points = np.concatenate([values, middles])
    beside = [np.nextafter(points, np.float32(s)) for s in (np.inf, -np.inf)]
    largest = np.finfo(np.float32).max
    return np.concatenate([points, *beside, [largest, -largest, 0.0, -0.0]])


def without_subnormals(x):
    # XLA flushes float32 subnormals to zero on CPU, in every operation.
    return x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)]


def assert_rounds(x, dtype):
    x = without_subnormals(x.astype(np.float32))
    got = np.asarray(jax.jit(round_to, static_argnums=1)(x, dtype))
    want = rounded(x, dtype).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()
    # The formats with an unsigned zero apart, the sign of zero stays.
    if not dtype.endswith("fnuz"):
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    # The value is one of the dtype's: a cast of it changes nothing.
    np.testing.assert_array_equal(got.astype(dtype).astype(np.float32), got)


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_of_all_values_midpoints_and_neighbours(dtype):
    assert_rounds(interesting_values(jnp.dtype(dtype)), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
def test_rounding_of_float64_rounds_once(dtype, x64):
    x = interesting_values(jnp.dtype(dtype)) if dtype != "float32" else np.ones(1)
    x = without_subnormals(x.astype(np.float32)).astype(np.float64)
    # Just beside a tie by less than float32 can tell: rounding twice gets these wrong.
    x = np.concatenate([x, x * (1 + 2.0**-40), x * (1 - 2.0**-40)])
    x = x[np.abs(x) < 3e38]
    got = np.asarray(round_to(jnp.asarray(x), dtype))
    values = np.sort(interesting_values(jnp.dtype(dtype))) if dtype != "float32" else x
    assert got.dtype == np.float64
    distance = np.abs(got - x)
    for side in (-1, 1):
        index = np.clip(
            np.searchsorted(values, x) + (side - 1) // 2, 0, len(values) - 1
        )
        neighbour = values[index].astype(np.float64)
        with np.errstate(over="ignore"):
            is_value = neighbour.astype(dtype).astype(np.float64) == neighbour
        assert (distance <= np.abs(neighbour - x))[is_value].all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_stays_and_infinity_where_the_dtype_has_it(dtype):
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    largest = float(jnp.finfo(dtype).max)
    # The names of formats that are finite end in "fn" or "fnuz".
    end = largest if "fn" in dtype else np.inf
    for function in (round_to, saturating_cast):
        got = np.asarray(function(jnp.asarray(x), dtype)).astype(np.float32)
        np.testing.assert_array_equal(got, np.array([np.nan, end, -end], np.float32))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("bf16", "bfloat16"),
        ("f16", "float16"),
        ("full", "float32"),
        ("float32", "float32"),
        ("f64", "float64"),
        ("e4m3fn", "float8_e4m3fn"),
        ("f8_e5m2", "float8_e5m2"),
        (np.float16, "float16"),
        (jnp.bfloat16, "bfloat16"),
        (np.dtype("float32"), "float32"),
    ],
)
def test_names_of_dtypes(spec, name):
    assert floating_dtype(spec, "here: x").name == name


@pytest.mark.parametrize(
    "spec",
    ["f8", "e4m3", "f8_e4m3", "f2", "double", "int", "", "float", "floating", None, 3],
)
def test_a_name_that_can_be_misread_is_an_error(spec):
    message = "here: expected x to be a floating dtype such .*, got "
    with pytest.raises(ValueError, match=message):
        floating_dtype(spec, "here: x")


def test_integers_are_no_floating_dtype():
    with pytest.raises(ValueError, match="here: expected x to be .*, got int32"):
        floating_dtype(jnp.int32, "here: x")


def test_half_is_the_dtype_of_the_backend():
    assert floating_dtype("half", "here: x") == optax_mp.half_dtype() == jnp.bfloat16


def test_a_cast_from_bfloat16_to_float16_saturates():
    x = jnp.array([7e4, -7e4, jnp.inf, 1.0], jnp.bfloat16)
    expected = [65504.0, -65504.0, np.inf, 1.0]
    assert saturating_cast(x, jnp.float16).tolist() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_rounding_is_the_identity_for_derivatives(dtype):
    """Also where numbers are so small that they are rounded to multiples."""
    tiny = float(jnp.finfo(dtype).smallest_normal)
    x = jnp.array([1.01, -0.3, 0.4 * tiny, -0.6 * tiny])
    _, slope = jax.jvp(partial(round_to, dtype=dtype), (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(slope, 1)
