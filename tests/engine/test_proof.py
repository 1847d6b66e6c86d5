"""A kernel is compared with XLA at its first use: a right one is used, a wrong one not.

By Pallas' interpreter on a CPU, which plays the device.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from host_memory import UNFUSED
from jax.experimental import pallas as pl

import optax_mp
from optax_mp.engine import (
    _by_platform,
    _evaluator,
    _explain,
    _gpu,
    _proof,
    _tpu,
)

KIND = "a card"
PARAMS = {"w": jnp.ones((256, 128), jnp.bfloat16)}
MODULES = {"tpu": _tpu, "cuda": _gpu}


def to_nearest(inner=None):
    low = optax_mp.low_bit_state(inner or optax.trace(0.9), min_size=1, seed=None)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


@pytest.fixture
def small(monkeypatch):
    """Two tiles of rows, and two groups of lanes: little for the interpreter."""
    monkeypatch.setattr(_proof, "_ROWS", 33)
    monkeypatch.setattr(_proof, "_COLUMNS", 256)
    monkeypatch.setattr(_proof, "_found", {})
    interpreted = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", interpreted)
    # Compiled in a third of the time.
    run = _proof._two_steps
    monkeypatch.setattr(_proof, "_two_steps", lambda *args: run(*args[:3], UNFUSED))


@pytest.fixture(params=["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def platform(request, small, monkeypatch):
    """Lower steps for a device of a platform, which is here."""
    (device,) = jax.local_devices()[:1]
    target = _by_platform.Target(request.param, kind=KIND, device=device)
    monkeypatch.setattr(_by_platform.Target, "of", lambda _: target)
    monkeypatch.setattr(_explain, "kind_here", lambda _: KIND)
    return request.param


def stepped(tx=None, params=PARAMS):
    """Return the bits after a step, and what the report says of the platform's kernel."""
    tx = tx or to_nearest()
    grads = jax.tree.map(lambda p: jnp.arange(p.size).reshape(p.shape) % 7, params)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype) - 3, grads, params)
    state = tx.init(params)
    # A function of its own, so that nothing is lowered already.
    step = jax.jit(lambda *args: optax_mp.take_step(tx, *args))
    result = as_bits(step(grads, state, params))
    (row,) = optax_mp.step_report(tx, grads, state, params).rows
    return result, row


def name_of(platform):
    return "gpu" if platform == "cuda" else platform


def test_a_kernel_that_is_right_is_used(platform):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, row = stepped()
    assert getattr(row, name_of(platform)) == "kernel"
    assert list(_proof._found.values()) == ["kernel"]
    stepped()  # not compared again
    assert len(_proof._found) == 1


def next_block(scales, index):
    return TAKE(scales, (index + 1) % scales.shape[1])


TAKE = _tpu._take_lanes
SPREAD = _gpu.PieceEvaluator.spread
INDEX = {x: x.index for x in (_gpu.PieceEvaluator, _tpu.TileEvaluator)}
# What is wrong in a kernel of a platform.
WRONG = {
    "rounding": ("both", _evaluator, "_round", lambda x, _: jnp.floor(x)),
    "lanes": ("tpu", _tpu, "_take_lanes", next_block),
    "blocks": (
        "cuda",
        _gpu.PieceEvaluator,
        "spread",
        lambda self, x, axis: SPREAD(self, jnp.roll(x, 1, -1), axis),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_is_not_used(name, platform, monkeypatch):
    on, *change = WRONG[name]
    if on not in ("both", platform):
        pytest.skip("of the other platform")
    monkeypatch.setattr(*change)
    text = rf"on a {KIND} a kernel .*: expected \w+ .* at \(.*\), got "
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=text) as warned:
        got, row = stepped()
    assert len(warned) == 1
    assert getattr(row, name_of(platform)) == f"not what XLA computes on a {KIND}"
    monkeypatch.setenv("OPTAX_MP_KERNELS", "0")
    assert got == stepped()[0]


def test_a_kernel_that_does_not_compile_is_not_used(platform, monkeypatch):
    def fail(*args, **settings):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(MODULES[platform], "run_tail", fail)
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="no such instruction"):
        stepped()


@pytest.mark.slow
def test_places_are_those_of_the_whole_array(platform, monkeypatch):
    """A shard that counts from its own first element has the random numbers of another."""
    tx = optax_mp.stochastic_rounding(
        optax_mp.low_bit_state(optax.trace(0.9), min_size=1)
    )
    stepped(tx)
    assert list(_proof._found.values()) == ["kernel"]
    _proof._found.clear()
    for kind, index in INDEX.items():
        monkeypatch.setattr(
            kind, "index", lambda self, axis, index=index: index(self, axis) - 1
        )
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="expected"):
        stepped(tx)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [optax.adamw(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=512)]
)
def test_any_rule_is_compared_exactly(rule, platform):
    """What compilers contract is no difference."""
    low = optax_mp.low_bit_state(rule, min_size=1)
    stepped(optax_mp.mixed_precision(low, storage=optax_mp.Split(16)))
    assert list(_proof._found.values()) == ["kernel"]


def test_distances_are_counted_in_numbers():
    a = np.array([0.0, -0.0, 1.0, np.nan, 1.0], np.float32)
    b = np.array([0.0, 0.0, np.nextafter(np.float32(1), 2), np.nan, np.inf], np.float32)
    assert _proof.distance(a, b)[:4].tolist() == [0, 1, 1, 0]
    assert _proof.distance(a, b)[4] > 1e8
    codes = [np.array(x, np.int8) for x in ([127, -128, 3], [-128, 127, 5])]
    assert _proof.distance(*codes).tolist() == [1, 1, 2]
