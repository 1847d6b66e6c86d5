"""A call that is lowered in another way on some platforms, and as written if that fails."""

import types
import warnings

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import optax_mp
from optax_mp.engine import _by_platform
from optax_mp.engine._by_platform import Target, run_by_platform

X = jnp.arange(4.0)


def lowered(rewrite, *platforms):
    traced = jax.jit(lambda x: run_by_platform(jnp.sin, rewrite, x)).trace(X)
    return traced.lower(lowering_platforms=platforms or ("tpu",)).as_text()


def cosine(target):
    return lambda values, *_: [jnp.cos(values[0])]


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu", "rocm"])
def test_a_platform_that_is_known_has_another_program(platform):
    assert ("stablehlo.cosine" in lowered(cosine, platform)) == (platform != "rocm")


def test_a_program_for_several_platforms_is_as_written():
    text = lowered(cosine, "tpu", "cpu")
    assert "stablehlo.sine" in text and "stablehlo.cosine" not in text


def test_it_runs_batches_and_differentiates_as_written():
    run = lambda x: run_by_platform(jnp.sin, cosine, x)  # noqa: E731
    assert (run(X) == jnp.sin(X)).all()
    assert (jax.jit(jax.vmap(run))(X) == jax.jit(jnp.sin)(X)).all()
    assert jax.grad(run)(0.0) == 1


def fails_at_once(values, *_):
    raise FloatingPointError("at once")


nothing = jax.extend.core.Primitive("nothing")
nothing.def_abstract_eval(lambda x: x)


def fails_while_lowered(values, *_):
    return [jax.jit(lambda x: nothing.bind(jnp.exp(x)))(values[0] * 3)]


@pytest.mark.parametrize("failing", [fails_at_once, fails_while_lowered])
def test_what_fails_is_lowered_as_written_with_one_warning(failing):
    """And leaves nothing behind."""
    with pytest.warns(
        optax_mp.MixedPrecisionWarning, match="as it is written"
    ) as warned:
        text = lowered(lambda _: failing)
    assert len(warned) == 1
    assert text == lowered(lambda *_: None)


def test_a_context_that_is_not_known_is_no_error(monkeypatch):
    def fail(context):
        raise AttributeError("renamed")

    monkeypatch.setattr(Target, "of", fail)
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="renamed"):
        assert "sine" in lowered(cosine, "cpu")


def targets(function, *args, platform="tpu"):
    found = []

    def rewrite(target):
        found.append(target)

    traced = jax.jit(lambda *x: function(rewrite, *x)).trace(*args)
    traced.lower(lowering_platforms=(platform,))
    return found


def run_sine(rewrite, x):
    return run_by_platform(jnp.sin, rewrite, x)


def test_a_target_knows_how_many_devices_see_an_array():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    sharded = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, spec))

    def mapped(rewrite, x):
        run = lambda x: run_sine(rewrite, x)  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    assert targets(run_sine, X) == [Target("tpu", 1)]
    assert targets(run_sine, sharded) == [Target("tpu", 8)]
    assert targets(mapped, sharded) == [Target("tpu", 1, is_within_shard_map=True)]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_target_knows_its_devices(is_here, monkeypatch):
    """By the client for which is lowered, not by what this machine has."""
    (device,) = jax.local_devices(backend="cpu")[:1]
    client = device.client
    if not is_here:
        other = types.SimpleNamespace(device_kind="TPU v3")
        client = types.SimpleNamespace(platform="cpu", devices=lambda: [other])
    found = _by_platform._device_of("cpu", client)
    assert found == ((device.device_kind, device) if is_here else ("TPU v3", None))
    assert _by_platform._device_of("tpu", client) == ("", None)


def test_no_warning_without_a_failure():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(cosine)
