"""How a dynamic loss scale moves, against the rule in plain NumPy."""

import numpy as np
import pytest
from reference import LossScaleRule, scale_trace
from scale_traces import SMALLEST, random_finite, run_link, run_values
from slow_cases import mostly_slow

import optax_mp


def assert_same_trace(state, want):
    names = optax_mp.LossScaleState._fields[:5]
    for name, expected in zip(names, want, strict=True):
        got = np.asarray(getattr(state, name))
        assert got.dtype == expected.dtype, name
        np.testing.assert_array_equal(got, expected, err_msg=name)


def random_rule(seed):
    rng = np.random.default_rng(seed)
    # The edges of the range first, then anything between them.
    edges = [1, 2, 3, 2000]
    interval = edges[seed] if seed < 4 else int(np.exp(rng.uniform(0, np.log(2000))))
    powers = bool(rng.integers(2))
    low = 2.0 ** int(rng.integers(-30, 3))
    high = low * 2.0 ** int(rng.integers(1, 36))
    settings = dict(
        growth_interval=interval,
        growth_factor=2.0 ** int(rng.integers(1, 4)) if powers else rng.uniform(1.1, 5),
        backoff_factor=0.5 ** int(rng.integers(1, 4)) if powers else rng.uniform(0.1, 0.9),
        min_scale=low,
        max_scale=high,
        hysteresis=1 + seed % 4,
    )  # fmt: skip
    start = low * 2.0 ** rng.integers(0, 1 + int(np.log2(high / low)))
    return rng, start, settings, powers


SEEDS, STEPS = 20, 50_000


# The first four have the edges of the interval, and each number of overflows to forgive.
@mostly_slow("seed", range(SEEDS), lambda seed: seed < 4)
def test_fuzzed_traces_equal_the_rule_in_plain_numpy(seed):
    rng, start, settings, powers = random_rule(seed)
    finite = random_finite(rng, STEPS, settings["growth_interval"])
    rule = LossScaleRule(start, **settings)
    want = scale_trace(rule, finite)
    tx = optax_mp.dynamic_loss_scale(init_scale=start, **settings)
    got = run_link(tx, finite, rng)

    assert_same_trace(got, want)
    np.testing.assert_array_equal(got.last_finite, finite)
    scales = np.asarray(got.scale)
    assert np.isfinite(scales).all()
    assert scales.min() >= settings["min_scale"]
    assert scales.max() <= settings["max_scale"]
    if powers:
        assert (np.frexp(scales)[0] == 0.5).all()
    # The sequence is worth comparing: both directions were taken.
    assert rule.events["grew"]
    assert rule.events["shrank"]


# Traces of known systems


def test_trace_of_torch_grad_scaler():
    tx = optax_mp.dynamic_loss_scale(
        init_scale=4.0, growth_interval=2, growth_factor=2.0, backoff_factor=0.25
    )
    state = run_link(tx, np.array([True, True, False]))
    assert [4.0, *state.scale.tolist()] == [4, 4, 8, 2]


def hysteresis_trace(pattern):
    tx = optax_mp.dynamic_loss_scale(init_scale=64.0, growth_interval=3, hysteresis=2)
    state = run_link(tx, np.array([step == "." for step in pattern]))
    return state.scale.tolist(), state.hysteresis_left.tolist()


def test_with_megatron_hysteresis_the_second_overflow_shrinks_and_each_further():
    assert hysteresis_trace("xxxx") == ([64, 32, 16, 8], [1, 0, 0, 0])


def test_megatron_hysteresis_is_not_refilled_by_finite_steps():
    assert hysteresis_trace("x..x..x") == (
        [64, 64, 64, 32, 32, 32, 16],
        [1, 1, 1, 0, 0, 0, 0],
    )


def test_megatron_hysteresis_is_refilled_by_growth():
    assert hysteresis_trace("xx...xx") == (
        [64, 32, 32, 32, 64, 64, 32],
        [1, 0, 0, 0, 2, 1, 0],
    )


def test_growth_that_max_scale_prevents_refills_hysteresis_as_well():
    tx = optax_mp.dynamic_loss_scale(
        init_scale=8.0, max_scale=8.0, growth_interval=2, hysteresis=2
    )
    state = run_link(tx, np.array([False, True, True, False, False]))
    assert state.hysteresis_left.tolist() == [1, 1, 2, 1, 0]
    assert state.scale.tolist() == [8, 8, 8, 8, 4]


# The range of the scale


@pytest.mark.parametrize("floor", [2.0**-14, 2.0**-40, 1.0, SMALLEST])
def test_400_bad_steps_end_at_the_floor(floor):
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0**16, min_scale=floor)
    state = run_link(tx, np.zeros(400, bool))
    assert state.scale[-1] == np.float32(floor)
    assert state.scale.min() > 0
    assert state.skipped_count[-1] == state.total_skipped_count[-1] == 400


@pytest.mark.parametrize("interval", [1, 2, 5, 2000])
def test_growth_comes_after_exactly_the_interval(interval):
    finite = np.ones(2 * interval, bool)
    want = [2.0] * (interval - 1) + [4.0] * interval + [8.0]
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0, growth_interval=interval)
    assert run_link(tx, finite).scale.tolist() == want
    value = optax_mp.DynamicLossScale(2.0, period=interval)
    assert run_values(value, finite)[0].tolist() == want


def test_a_static_scale_stays_and_counts():
    state = run_link(
        optax_mp.static_loss_scale(scale=0.75), np.array([True, False, False, True])
    )
    assert state.scale.tolist() == [0.75] * 4
    assert state.skipped_count.tolist() == [0, 1, 2, 0]
    assert state.total_skipped_count.tolist() == [0, 1, 2, 2]
    assert state.last_finite.tolist() == [True, False, False, True]
