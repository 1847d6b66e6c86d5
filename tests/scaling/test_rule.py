"""How a dynamic loss scale moves, against the rule in plain NumPy."""

import numpy as np
import pytest
from reference import LossScaleRule, scale_trace
from scale_traces import LARGEST, SMALLEST, random_kinds, run_link, run_values
from slow_cases import mostly_slow

import optax_mp

FIELDS = optax_mp.LossScaleState._fields[:5]


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


# The first four have the edges of the interval, and each number of overflows to forgive.
@mostly_slow("seed", range(6), lambda seed: seed < 4)
def test_fuzzed_traces_equal_the_rule_in_plain_numpy(seed):
    """Overflows as torch; bad losses leave the scale."""
    rng, start, settings, powers = random_rule(seed)
    kinds = random_kinds(rng, 20_000, settings["growth_interval"], seed % 2 == 0)
    rule = LossScaleRule(start, **settings)
    want = scale_trace(rule, kinds)
    tx = optax_mp.dynamic_loss_scale(init_scale=start, **settings)
    state = run_link(tx, kinds, rng)

    for name, expected in zip(FIELDS, want, strict=True):
        got = np.asarray(getattr(state, name))
        assert got.dtype == expected.dtype, name
        np.testing.assert_array_equal(got, expected, err_msg=name)
    np.testing.assert_array_equal(state.last_finite, [x == "." for x in kinds])
    scales = np.asarray(state.scale)
    assert np.isfinite(scales).all()
    assert (
        settings["min_scale"] <= scales.min() <= scales.max() <= settings["max_scale"]
    )
    if powers:
        assert (np.frexp(scales)[0] == 0.5).all()
    # The sequence is worth comparing: both directions were taken.
    assert rule.events["grew"] and rule.events["shrank"]


@mostly_slow("seed", range(6), lambda seed: seed < 2)
def test_fuzzed_values_equal_the_rule_in_plain_numpy(seed):
    rng = np.random.default_rng(100 + seed)
    period = int([1, 2000, *rng.integers(2, 60, 4)][seed])
    factor = float([2, 4, 3, 2, rng.uniform(1.1, 5), 7][seed])
    floor = 2.0 ** int(rng.integers(-30, 3))
    start = floor * 2.0 ** int(rng.integers(0, 30))
    kinds = random_kinds(rng, 20_000, period)
    rule = LossScaleRule(
        start, period, factor, 1 / factor, min_scale=floor, max_scale=LARGEST
    )
    want = scale_trace(rule, kinds)
    scale = optax_mp.DynamicLossScale(
        start, period=period, factor=factor, min_loss_scale=floor
    )
    scales, counters = run_values(scale, kinds)
    assert rule.events["grew"] and rule.events["floored"]
    np.testing.assert_array_equal(scales, want[0])
    np.testing.assert_array_equal(counters, want[1])


GRAD_SCALER = dict(init_scale=4, growth_interval=2)
MEGATRON = dict(init_scale=64, growth_interval=3, hysteresis=2)
AT_MOST_8 = dict(init_scale=8, max_scale=8, growth_interval=2, hysteresis=2)
FROM_1 = dict(init_scale=2, min_scale=1, growth_interval=2)
# Claim: settings, steps, scales, hysteresis left.
TRACES = {
    "torch": (GRAD_SCALER, "..xx", [4, 8, 4, 2], [1, 1, 0, 0]),
    "the second overflow shrinks, and each further":
        (MEGATRON, "xxxx", [64, 32, 16, 8], [1, 0, 0, 0]),
    "finite steps do not refill":
        (MEGATRON, "x..x..x", [64, 64, 64, 32, 32, 32, 16], [1, 1, 1, 0, 0, 0, 0]),
    "growth refills":
        (MEGATRON, "xx...xx", [64, 32, 32, 32, 64, 64, 32], [1, 0, 0, 0, 2, 1, 0]),
    "growth that max_scale prevents refills":
        (AT_MOST_8, "x..xx", [8, 8, 8, 8, 4], [1, 1, 2, 1, 0]),
    "an overflow at the floor is remembered until growth":
        (FROM_1, "xx.x..", [1, 1, 1, 1, 1, 2], [0, -1, -1, -1, -1, 1]),
    "a bad loss neither shrinks nor spends, and restarts the count":
        (GRAD_SCALER, ".n.n..", [4, 4, 4, 4, 4, 8], [1] * 6),
}  # fmt: skip


@pytest.mark.parametrize("claim", TRACES)
def test_a_trace_by_hand(claim):
    settings, kinds, scales, left = TRACES[claim]
    state = run_link(optax_mp.dynamic_loss_scale(**settings), kinds)
    assert (state.scale.tolist(), state.hysteresis_left.tolist()) == (scales, left)


@pytest.mark.parametrize("floor", [1.0, SMALLEST])
def test_400_bad_steps_end_at_the_floor(floor):
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0**16, min_scale=floor)
    state = run_link(tx, "x" * 400)
    assert state.scale[-1] == np.float32(floor)
    assert state.scale.min() > 0
    assert state.skipped_count[-1] == state.total_skipped_count[-1] == 400


@pytest.mark.parametrize("interval", [1, 2000])
def test_growth_comes_after_exactly_the_interval(interval):
    finite = "." * (2 * interval)
    want = [2.0] * (interval - 1) + [4.0] * interval + [8.0]
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0, growth_interval=interval)
    assert run_link(tx, finite).scale.tolist() == want
    value = optax_mp.DynamicLossScale(2.0, period=interval)
    assert run_values(value, finite)[0].tolist() == want


def test_a_static_scale_stays_and_counts():
    state = run_link(optax_mp.static_loss_scale(scale=0.75), ".xn.")
    assert state.scale.tolist() == [0.75] * 4
    assert state.finite_count.tolist() == [1, 0, 0, 1]
    assert state.skipped_count.tolist() == [0, 1, 2, 0]
    assert state.total_skipped_count.tolist() == [0, 1, 2, 2]
    assert state.last_finite.tolist() == [True, False, False, True]
