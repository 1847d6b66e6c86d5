"""Which kernels there are: by the setting, the target, and whatever fails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from host_memory import needs_memories

import optax_mp
from optax_mp import _warnings
from optax_mp._jax._control_flow import STEP
from optax_mp.engine import _evaluator, _kernels, _layout
from optax_mp.engine._by_platform import Target

SHAPE = (256, 128)
PARAMS = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}


def compact(inner=None):
    low = optax_mp.low_bit_state(inner or optax.adamw(0.1), min_size=1)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def traced(tx, params=PARAMS, grads=None, way="take_step"):
    step = (
        functools.partial(optax_mp.take_step, tx) if way == "take_step" else tx.update
    )
    grads = params if grads is None else grads
    return jax.jit(step).trace(grads, jax.eval_shape(tx.init, params), params)


def lowered(tx, platform="tpu"):
    return traced(tx).lower(lowering_platforms=(platform,)).as_text()


def report(tx):
    state = jax.eval_shape(tx.init, PARAMS)
    return optax_mp.step_report(tx, PARAMS, state, PARAMS).rows[0]


@pytest.mark.parametrize("word", ["0", "false", "off", "OFF", "1", "true", "on", ""])
def test_a_word_turns_kernels_off_or_on(word, monkeypatch):
    monkeypatch.setenv("OPTAX_MP_KERNELS", word)
    is_on = word in ("1", "true", "on", "")
    assert ("tpu_custom_call" in lowered(compact())) == is_on
    want = "kernel, not proved here" if is_on else f"OPTAX_MP_KERNELS={word}"
    assert report(compact()).gpu == want


@pytest.mark.parametrize("word", ["no", "2", "kernels"])
def test_another_word_is_an_error(word, monkeypatch):
    monkeypatch.setenv("OPTAX_MP_KERNELS", word)
    with pytest.raises(
        ValueError, match=f"OPTAX_MP_KERNELS .* to be 0, fal.*, got '{word}'"
    ):
        lowered(compact())
    traced(optax_mp.mixed_precision(optax.adamw(0.1)))  # it has none


@pytest.mark.parametrize("kind", ["TPU v2", "TPU v3", "TPU v4", "TPU v5 lite", ""])
def test_a_kernel_is_for_the_kind_of_the_target(kind):
    """Whatever machine compiles."""
    kernels = _kernels.kernels_for(Target("tpu", kind=kind))
    assert (kernels == kind) == (kind in ("TPU v2", "TPU v3"))


def test_a_frozen_8_bit_param_is_no_low_bit_state():
    """As a base of QLoRA is, beside plain masters."""
    params = PARAMS | {"base": jax.ShapeDtypeStruct(SHAPE, jnp.int8)}
    grads = PARAMS | {"base": None}
    for tx in (optax_mp.mixed_precision(optax.adamw(0.1)), optax.adamw(0.1)):
        tx = optax.masked(tx, {"w": True, "base": False})
        assert STEP not in str(traced(tx, params, grads).jaxpr)
    tx = optax.masked(compact(), {"w": True, "base": False})
    assert STEP in str(traced(tx, params, grads).jaxpr)


def counting(dtype):
    """A rule that counts its steps, as its authors like to."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros((), dtype),
        lambda grads, count, params=None: (grads, count + 1),
    )


@pytest.mark.parametrize("way", ["take_step", "update"])
def test_an_integer_in_the_state_of_others_is_no_code(way):
    for dtype in ("int16", "int8", "uint16"):
        rule = optax.chain(optax.sgd(0.1), counting(dtype))
        masters, rounded = optax_mp.mixed_precision, optax_mp.stochastic_rounding
        for tx in (masters(rule), rounded(rule)):
            jaxpr = traced(tx, way=way).jaxpr
            assert STEP not in str(jaxpr)


HIDING = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"a": tx}, {"w": "a"}),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(rate=1.0),
}


@pytest.mark.parametrize("name", HIDING)
def test_codes_are_found_in_whatever_hides_them(name):
    """By take_step, and by the masters around: both then step leaf by leaf."""
    low = optax_mp.low_bit_state(optax.adam(0.1), min_size=1)
    tx = optax_mp.mixed_precision(HIDING[name](low))
    for way in ("update", "take_step"):
        jaxpr = traced(tx, way=way).jaxpr
        (outer,) = [x for x in jaxpr.eqns if x.primitive.name == STEP]
        assert STEP in str(outer.params["jaxpr"])  # its own update is one, too


@needs_memories
def test_no_kernel_is_imported_for_another_platform(monkeypatch):
    """Codes in host memory are copied by one on a TPU alone."""

    def fail(name):
        raise ImportError(name)

    tx = optax_mp.offload(compact(), chunk_bytes=2**17)
    params = {"w": jnp.ones((512, 256), jnp.bfloat16)}
    step = functools.partial(optax_mp.take_step, tx)
    step = jax.jit(step, donate_argnums=(1, 2)).trace(params, tx.init(params), params)
    on_a_tpu = step.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in on_a_tpu
    monkeypatch.setattr(_kernels, "import_module", fail)
    jax.clear_caches()
    assert "tpu_custom_call" not in step.lower().as_text()


def test_whatever_fails_ends_in_the_step_as_written(monkeypatch):
    def fail(*args, **settings):
        raise KeyError("a fault of the engine")

    monkeypatch.setattr(_layout.Part, "of", fail)
    for platform in ("tpu", "cuda"):
        _warnings.warn_once.cache_clear()
        with pytest.warns(optax_mp.MixedPrecisionWarning, match="a fault of") as warned:
            text = lowered(compact(), platform)
        assert "call @optax_mp_step" in text and "custom_call" not in text
        assert len(warned) == 1
    row = report(compact())
    assert row.tpu == row.gpu == "KeyError: 'a fault of the engine'"


def test_ties_are_rounded_in_kernels_as_by_xla():
    method = jax.lax.RoundingMethod.TO_NEAREST_EVEN
    settings = [{"exponent_bits": 8, "mantissa_bits": n} for n in (7, 10, 15)]

    def pairs(x, close):
        yield _evaluator._round(x, method), jax.lax.round(x, method)
        for params in settings:
            y = 1 + close * 2.0 ** -(params["mantissa_bits"] + 2)
            ours = _evaluator.reduce_precision(y, params)
            yield ours, jax.lax.reduce_precision(y, **params)

    for ours, theirs in jax.jit(lambda *x: list(pairs(*x)))(
        np.arange(-40, 41, dtype="float32") / 8, np.arange(64, dtype="float32")
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_narrow_integers_wrap_in_kernels(dtype):
    numbers = np.arange(-70000, 70000, 999, dtype="int32")
    held = jax.jit(lambda x: _evaluator._wrap_or_round(jnp.dtype(dtype), x))(numbers)
    np.testing.assert_array_equal(held, numbers.astype(dtype))
