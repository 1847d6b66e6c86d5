"""gradient_range_report against casts by NumPy and by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp

FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def by_casting(values, dtype):
    """Return the shares that become 0, subnormal and not finite, by a cast."""
    values = np.asarray(values, np.float32).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.abs(values.astype(jnp.dtype(dtype)).astype(np.float32))
    normal = np.float32(jnp.finfo(dtype).smallest_normal)
    finite = np.isfinite(values)
    return (
        np.mean((values != 0) & (rounded == 0)),
        np.mean((rounded != 0) & (rounded < normal)),
        np.mean(finite & ~np.isfinite(rounded)),
    )


def shares(report, dtype, path=None, **settings):
    fit = report.in_format(dtype, path, **settings)
    return fit.underflow, fit.subnormal, fit.overflow


def test_shares_are_those_of_a_cast_in_the_middle_of_every_octave():
    values = np.float32(1.5) * 2.0 ** np.arange(-126, 128, dtype=np.float32)
    report = optax_mp.gradient_range_report(list(values))
    for path, value in zip(report.paths, values, strict=True):
        for dtype in FORMATS:
            assert shares(report, dtype, path) == by_casting(value, dtype), value


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"]
)
def test_values_of_any_dtype_are_looked_at_as_they_are(dtype):
    size = 8 * jnp.dtype(dtype).itemsize
    pattern = np.arange(min(2**size, 2**16), dtype=f"uint{size}")
    values = pattern.view(jnp.dtype(dtype))
    with jax.numpy_dtype_promotion("strict"):
        report = jax.jit(optax_mp.gradient_range_report)({"w": values})
    wide = values.astype(np.float32)
    assert report.zeros() == np.mean(wide == 0)
    assert report.not_finite() == np.mean(~np.isfinite(wide))


@pytest.fixture
def grads():
    keys = jax.random.split(jax.random.key(0), 3)
    spread = jnp.exp2(6 * jax.random.normal(keys[0], (40, 50)))
    return {
        "w": 1e-6 * spread * jax.random.normal(keys[1], (40, 50)),
        "b": jax.random.normal(keys[2], (7,)).at[:2].set(0),
        "count": jnp.int32(3),
        "frozen": None,
        "empty": jnp.zeros((0, 3)),
    }


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**13])
def test_what_a_format_would_do_is_known_to_the_octave(grads, loss_scale):
    report = optax_mp.gradient_range_report(grads["w"])
    for dtype in FORMATS:
        less, near, more = (
            by_casting(grads["w"] * loss_scale * factor, dtype)
            for factor in (0.5, 1.0, 2.0)
        )
        found = shares(report, dtype, loss_scale=loss_scale)
        assert more[0] <= found[0] <= less[0] and less[2] <= found[2] <= more[2]
        # All numbers of an octave count as its middle does.
        np.testing.assert_allclose(found, near, rtol=0, atol=0.03)


@pytest.mark.parametrize("dtype", FORMATS[1:])
def test_under_the_best_loss_scale_the_largest_value_may_grow_fourfold(grads, dtype):
    scale = optax_mp.gradient_range_report(grads).best_loss_scale(dtype)
    largest = max(float(jnp.abs(grads[name]).max()) for name in "wb")
    assert 4 * scale * largest <= float(jnp.finfo(dtype).max) < 16 * scale * largest
    assert np.log2(scale) % 1 == 0
    tiny = optax_mp.gradient_range_report(jnp.float32(2.0**-126))
    assert tiny.best_loss_scale(dtype) == 2.0**126


@pytest.mark.parametrize("values", [[0.0, 0.0], [np.nan, np.inf], []])
def test_from_no_finite_value_comes_no_loss_scale(values):
    report = optax_mp.gradient_range_report(jnp.array(values, jnp.float32))
    assert np.isnan(report.best_loss_scale())
    assert str(report).splitlines()[3:] == [
        "no loss scale fits: there is no finite value other than 0"
    ]


def test_scaled_gradients_are_reported_as_they_are_without_the_scale(grads):
    params = {"w": jnp.full((40, 50), 1e-3, jnp.float16)}
    tx = optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(optax.sgd(0.1)))
    opt_state = tx.init(params)

    @jax.jit
    def report_of(opt_state, params):
        def loss(p):
            return jnp.sum(p["w"].astype(jnp.float32) ** 3)

        _, scaled = optax_mp.value_and_grad(loss)(opt_state, params)
        return optax_mp.gradient_range_report(
            scaled, loss_scale=optax_mp.loss_scale(opt_state)
        )

    report = report_of(opt_state, params)
    assert shares(report, "float8_e4m3fn") == (1, 0, 0)  # 3e-6
    assert shares(report, "float16") == (0, 1, 0)


def test_the_table_never_rounds_some_to_none_or_all():
    values = jnp.ones(10_000).at[0].set(1e-9)
    row = str(optax_mp.gradient_range_report(values)).splitlines()[2]
    assert row.split()[-3:] == ["<.1u"] * 3
    values = jnp.full(10_000, 1e-9).at[0].set(1)
    row = str(optax_mp.gradient_range_report(values)).splitlines()[2]
    assert row.split()[-3:] == [">99u"] * 3


def test_bad_input_is_an_error_that_names_it(grads):
    with pytest.raises(ValueError, match="floating arrays .*, got a dict without any"):
        optax_mp.gradient_range_report({"n": jnp.arange(3)})
    large = {"w": jax.ShapeDtypeStruct((2**17, 2**15), jnp.float32)}
    with pytest.raises(
        ValueError, match=r"leaf \['w'\] .*, got float32\[131072,32768\]"
    ):
        jax.eval_shape(optax_mp.gradient_range_report, large)
    report = optax_mp.gradient_range_report(grads)
    with pytest.raises(ValueError, match="`dtype` to be one of bfloat.*, got float32"):
        report.in_format("float32")
    with pytest.raises(ValueError, match=r"`path` to be one of .*\['w'\].*, got 'w'"):
        report.zeros("w")
    with pytest.raises(TypeError, match="concrete `counts`, got .* read it outside"):
        jax.jit(lambda g: optax_mp.gradient_range_report(g).zeros())(grads)
    for scale in (0, -2.0, np.nan, np.inf, 1j, np.ones((2, 1))):
        error = TypeError if np.ndim(scale) or scale == 1j else ValueError
        message = "expected `loss_scale` to be a positive finite float32 .*, got "
        with pytest.raises(error, match="gradient_range_report: " + message):
            optax_mp.gradient_range_report(jnp.ones(3), loss_scale=scale)
        with pytest.raises(error, match="in_format: " + message):
            report.in_format("f16", loss_scale=scale)


def test_reports_draw_their_bars():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    params = {"w": jnp.array([0.0, 1e-9, 0.3, 3e5], jnp.float32)}
    axes = optax_mp.gradient_range_report(params).plot()
    heights = {x.get_x(): x.get_height() for x in axes.patches if x.get_height()}
    assert heights == {-30: 25, -2: 25, 18: 25}
    adam = optax.adam(0.1)
    for tx, total in ((optax_mp.mixed_precision(adam), 14), (adam, 6)):
        params = {"w": jnp.ones(4096, jnp.bfloat16)}
        report = optax_mp.memory_report(tx.init(params), params)
        drawn = report.plot(pyplot.subplots()[1])
        tops = [x.get_y() + x.get_height() for x in drawn.patches]
        # There are counters of 4 bytes beside 4,096 weights.
        assert tops[-2:] == pytest.approx([total, 12], abs=0.01)
        assert len(drawn.patches) == 2 * len(report.by_role())
    pyplot.close("all")
