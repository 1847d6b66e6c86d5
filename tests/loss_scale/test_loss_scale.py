"""The loss-scaling rule against plain NumPy, and loss scales as values."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from jax import lax
from reference import LossScaleRule, scale_trace

import optax_mp

SMALLEST, LARGEST = 2.0**-126, 2.0**126
BAD = np.array([np.nan, np.inf, -np.inf], np.float32)

# No field is at its default, and the floor is under 1.
CHANGED = {
    "static": optax_mp.StaticLossScale(0.75),
    "dynamic": optax_mp.DynamicLossScale(
        24.0, counter=3, period=7, factor=3.0, min_loss_scale=2.0**-10
    ),
}
FIELDS = ("loss_scale", "counter", "period", "factor", "min_loss_scale")


def fields(value):
    """Return every field of a loss scale as Python numbers."""
    return {n: float(getattr(value, n)) for n in FIELDS if hasattr(value, n)}


def run_link(tx, finite, rng=None):
    """Return the states of a chain link, stacked over the steps of one scan."""
    rng = rng or np.random.default_rng(0)
    bad = BAD[rng.integers(0, len(BAD), len(finite))]
    grads = np.where(finite, np.float32(-2.5), bad)

    @jax.jit
    def run(grads):
        def step(state, grad):
            state = tx.update({"w": grad}, state)[1]
            return state, state

        return lax.scan(step, tx.init({"w": jnp.float32(0)}), grads)[1]

    return run(grads)


def run_values(scale, finite):
    """Return a loss scale's values, stacked over the steps of one scan."""

    @jax.jit
    def run(scale, finite):
        def step(scale, is_finite):
            scale = scale.adjust(is_finite)
            return scale, (scale.loss_scale, scale.counter)

        return lax.scan(step, scale, finite)[1]

    return run(scale, finite)


def assert_same_trace(state, want):
    names = optax_mp.LossScaleState._fields[:5]
    for name, expected in zip(names, want, strict=True):
        got = np.asarray(getattr(state, name))
        assert got.dtype == expected.dtype, name
        np.testing.assert_array_equal(got, expected, err_msg=name)


def random_finite(rng, steps, interval):
    """Return which steps are finite: runs about `interval` long, and bursts."""
    out = np.empty(steps, bool)
    at = 0
    while at < steps:
        near = interval + rng.integers(-1, 2)
        run = int(rng.choice([rng.integers(0, 4), near, 3 * interval, 8 * interval]))
        burst = int(rng.choice([1, 2, rng.integers(1, 9), rng.integers(1, 120)]))
        out[at : at + run] = True
        out[at + run : at + run + burst] = False
        at += run + burst
    return out


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


@pytest.mark.parametrize("seed", range(SEEDS))
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


def test_the_fuzzed_settings_meet_every_event_of_the_rule():
    met, intervals, hysteresis = {}, set(), set()
    for seed in range(SEEDS):
        rng, start, settings, _ = random_rule(seed)
        rule = LossScaleRule(start, **settings)
        for finite in random_finite(rng, 3000, settings["growth_interval"]):
            rule.step(finite)
        for name, count in rule.events.items():
            met[name] = met.get(name, 0) + count
        intervals.add(settings["growth_interval"])
        hysteresis.add(settings["hysteresis"])
    assert all(met.values()), met
    assert {1, 2000} <= intervals
    assert hysteresis == {1, 2, 3, 4}


@pytest.mark.parametrize("seed", range(6))
def test_fuzzed_values_equal_the_rule_in_plain_numpy(seed):
    rng = np.random.default_rng(100 + seed)
    period = int([1, 2000, *rng.integers(2, 60, 4)][seed])
    factor = float([2, 4, 3, 2, rng.uniform(1.1, 5), 7][seed])
    floor = 2.0 ** int(rng.integers(-30, 3))
    start = floor * 2.0 ** int(rng.integers(0, 30))
    finite = random_finite(rng, 20_000, period)
    rule = LossScaleRule(
        start, period, factor, 1 / factor, min_scale=floor, max_scale=LARGEST
    )
    want = scale_trace(rule, finite)
    scale = optax_mp.DynamicLossScale(
        start, period=period, factor=factor, min_loss_scale=floor
    )
    scales, counters = run_values(scale, finite)
    assert rule.events["grew"]
    assert rule.events["floored"]
    np.testing.assert_array_equal(scales, want[0])
    np.testing.assert_array_equal(counters, want[1])


def test_the_wrapper_moves_its_counters_as_the_link():
    finite = random_finite(np.random.default_rng(5), 400, 3)
    settings = dict(init_scale=8.0, growth_interval=3, hysteresis=2, max_scale=64.0)
    link = run_link(optax_mp.dynamic_loss_scale(**settings), finite)
    wrapper = run_link(optax_mp.dynamic_loss_scale(optax.sgd(0.1), **settings), finite)
    assert as_bits(wrapper._replace(inner_state=())) == as_bits(
        link._replace(inner_state=())
    )


# Traces of known systems


def test_trace_of_torch_grad_scaler():
    tx = optax_mp.dynamic_loss_scale(
        init_scale=4.0, growth_interval=2, growth_factor=2.0, backoff_factor=0.25
    )
    state = run_link(tx, np.array([True, True, False]))
    assert [4.0, *state.scale.tolist()] == [4, 4, 8, 2]


@pytest.mark.parametrize(
    ("start", "finite", "end"), [(400.0, [False] * 4, 25.0), (2.0, [True] * 8, 32.0)]
)
def test_trace_of_keras_loss_scale_optimizer(start, finite, end):
    tx = optax_mp.dynamic_loss_scale(init_scale=start, growth_interval=2)
    assert run_link(tx, np.array(finite)).scale[-1] == end
    value = optax_mp.DynamicLossScale(start, period=2)
    assert run_values(value, np.array(finite))[0][-1] == end


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


@pytest.mark.parametrize("floor", [2.0**-14, 1.0, SMALLEST])
def test_400_bad_steps_bring_a_value_to_the_floor(floor):
    scale = optax_mp.DynamicLossScale(2.0**16, min_loss_scale=floor)
    scales, _ = run_values(scale, np.zeros(400, bool))
    assert scales[-1] == np.float32(floor)
    assert scales.min() > 0


def test_400_growths_of_a_value_stay_finite_and_invertible():
    scale = optax_mp.DynamicLossScale(2.0**16, period=1)
    scales, _ = run_values(scale, np.ones(400, bool))
    assert scales[-1] == np.float32(LARGEST)
    assert (1 / scales > 0).all()


def test_growth_that_would_pass_the_cap_is_not_taken():
    tx = optax_mp.dynamic_loss_scale(
        init_scale=3.0, growth_interval=1, growth_factor=2.0, max_scale=20.0
    )
    state = run_link(tx, np.ones(6, bool))
    assert state.scale.tolist() == [6, 12, 12, 12, 12, 12]


def test_growth_may_reach_the_cap():
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0, growth_interval=1, max_scale=8.0)
    assert run_link(tx, np.ones(3, bool)).scale.tolist() == [4, 8, 8]


@pytest.mark.parametrize("interval", [1, 2, 5, 2000])
def test_growth_comes_after_exactly_the_interval(interval):
    finite = np.ones(2 * interval, bool)
    want = [2.0] * (interval - 1) + [4.0] * interval + [8.0]
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0, growth_interval=interval)
    assert run_link(tx, finite).scale.tolist() == want
    value = optax_mp.DynamicLossScale(2.0, period=interval)
    assert run_values(value, finite)[0].tolist() == want


def test_an_overflow_starts_the_interval_anew():
    tx = optax_mp.dynamic_loss_scale(init_scale=4.0, growth_interval=3)
    state = run_link(tx, np.array([True, True, False, True, True, True]))
    assert state.scale.tolist() == [4, 4, 2, 2, 2, 4]
    assert state.finite_count.tolist() == [1, 2, 0, 1, 2, 0]


def test_skipped_in_a_row_ends_with_a_finite_step_and_the_total_stays():
    tx = optax_mp.dynamic_loss_scale()
    state = run_link(tx, np.array([False, False, True, False]))
    assert state.skipped_count.tolist() == [1, 2, 0, 1]
    assert state.total_skipped_count.tolist() == [1, 2, 2, 3]


def test_a_static_scale_stays_and_counts():
    state = run_link(
        optax_mp.static_loss_scale(scale=0.75), np.array([True, False, False, True])
    )
    assert state.scale.tolist() == [0.75] * 4
    assert state.skipped_count.tolist() == [0, 1, 2, 0]
    assert state.total_skipped_count.tolist() == [0, 1, 2, 2]
    assert state.last_finite.tolist() == [True, False, False, True]


def test_the_state_keeps_dtypes_and_weak_types():
    tx = optax_mp.dynamic_loss_scale()
    before = tx.init({"w": jnp.ones(2)})
    after = tx.update({"w": jnp.ones(2)}, before)[1]
    assert avals(after) == avals(before)
    names = [leaf.dtype.name for leaf in before[:6]]
    assert names == ["float32", "int32", "int32", "int32", "int32", "bool"]


def test_counters_that_cannot_count_further_stay():
    tx = optax_mp.dynamic_loss_scale()
    most = jnp.int32(2**31 - 1)
    state = tx.init({"w": jnp.ones(2)})._replace(
        skipped_count=most, total_skipped_count=most
    )
    state = tx.update({"w": jnp.full(2, jnp.nan)}, state)[1]
    assert state.skipped_count == state.total_skipped_count == most


# No field is lost


def through_scan(value):
    return lax.scan(lambda c, _: (c, None), value, None, length=2)[0]


ROUND_TRIPS = {
    "jit": lambda v: jax.jit(lambda x: x)(v),
    "scan": through_scan,
    "while_loop": lambda v: lax.while_loop(lambda _: False, lambda x: x, v),
    "cond": lambda v: lax.cond(True, lambda x: x, lambda x: x, v),
    "tree_map": lambda v: jax.tree.map(lambda x: x, v),
    "flatten": lambda v: jax.tree.structure(v).unflatten(jax.tree.leaves(v)),
    "device_get": jax.device_get,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "vmap": lambda v: jax.tree.map(
        lambda x: x[1],
        jax.vmap(lambda x: x)(jax.tree.map(lambda x: jnp.stack([x, x]), v)),
    ),
}


@pytest.mark.parametrize("trip", ROUND_TRIPS)
@pytest.mark.parametrize("kind", CHANGED)
def test_no_field_is_lost_on_the_way_through(kind, trip):
    value = CHANGED[kind]
    back = ROUND_TRIPS[trip](value)
    assert type(back) is type(value)
    assert fields(back) == fields(value)
    assert as_bits(back) == as_bits(value)


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_the_value_for_no_scaling_goes_through(trip):
    value = optax_mp.NoOpLossScale()
    if trip == "vmap":
        pytest.skip("it has no arrays to map over")
    assert ROUND_TRIPS[trip](value) == value


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_a_floor_under_one_still_holds_after(trip):
    value = ROUND_TRIPS[trip](CHANGED["dynamic"])
    scales, _ = run_values(value, np.zeros(40, bool))
    assert scales[-1] == 2.0**-10


def test_adjust_keeps_the_settings():
    adjusted = CHANGED["dynamic"].adjust(False)
    assert fields(adjusted) == dict(
        fields(CHANGED["dynamic"]), loss_scale=8.0, counter=0.0
    )


@pytest.mark.parametrize("name", ["tree_map", "eval_shape"])
def test_leaves_may_be_replaced_by_anything(name):
    value = CHANGED["dynamic"]
    if name == "tree_map":
        other = jax.tree.map(lambda _: "any", value)
        assert (other.loss_scale, other.counter) == ("any", "any")
    else:
        other = jax.eval_shape(lambda x: x, value)
        assert other.loss_scale.dtype == jnp.float32
    assert other.min_loss_scale == 2.0**-10


def test_settings_are_static_so_that_only_arrays_are_leaves():
    shapes = [(x.dtype.name, x.shape) for x in jax.tree.leaves(CHANGED["dynamic"])]
    assert shapes == [("float32", ()), ("int32", ())]
    assert len(jax.tree.leaves(CHANGED["static"])) == 1
    assert jax.tree.leaves(optax_mp.NoOpLossScale()) == []


def test_adjust_does_not_recompile():
    traces = 0

    @jax.jit
    def step(scale, finite):
        nonlocal traces
        traces += 1
        return scale.adjust(finite)

    scale = optax_mp.DynamicLossScale(8.0, period=2)
    for finite in (True, True, False):
        scale = step(scale, jnp.array(finite))
    assert traces == 1
    assert scale.loss_scale == 8


# Scaling and unscaling


@pytest.mark.parametrize("direction", ["scale", "unscale"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_floats_are_scaled_in_float32(kind, dtype, direction):
    value = {
        "static": optax_mp.StaticLossScale(2.0**16),
        "dynamic": optax_mp.DynamicLossScale(2.0**16),
    }[kind]
    leaf = jnp.array([0.5, -3.0, 1.75], dtype)
    out = getattr(value, direction)({"a": [leaf]})["a"][0]
    factor = 2.0**16 if direction == "scale" else 2.0**-16
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.array([0.5, -3, 1.75], np.float32) * factor)


@pytest.mark.usefixtures("x64")
def test_float64_is_scaled_in_float64():
    scale = optax_mp.StaticLossScale(2.0**10)
    exact = 1 + 2.0**-40
    up, down = scale.scale(jnp.float64(exact)), scale.unscale(jnp.float64(exact))
    assert up.dtype == down.dtype == jnp.float64
    assert float(up) == exact * 2.0**10
    assert float(down) == exact * 2.0**-10


@pytest.mark.usefixtures("x64")
def test_a_scale_is_float32_with_64_bit_types_on():
    scale = optax_mp.DynamicLossScale(jnp.float64(8), counter=jnp.int64(1), period=2)
    after = scale.adjust(True)
    for value in (scale, after):
        assert value.loss_scale.dtype == jnp.float32
        assert value.counter.dtype == jnp.int32
    assert after.loss_scale == 16


def test_complex_is_scaled():
    out = optax_mp.StaticLossScale(8.0).scale(jnp.array([1 + 2j], jnp.complex64))
    assert out.dtype == jnp.complex64
    assert out.tolist() == [8 + 16j]


def test_what_is_no_float_passes_through():
    tree = {
        "int": jnp.arange(3),
        "key": jax.random.key(0),
        "bool": jnp.array([True]),
        "none": None,
        "string": "name",
        "function": jax.nn.relu,
    }
    scale = optax_mp.StaticLossScale(8.0)
    for out in (scale.scale(tree), scale.unscale(tree)):
        assert out.keys() == tree.keys()
        assert all(out[name] is tree[name] for name in tree)


def test_numpy_arrays_and_scalars_are_scaled():
    scale = optax_mp.StaticLossScale(8.0)
    out = scale.scale([np.ones(2, np.float16), np.float32(3)])
    assert [x.dtype for x in out] == [jnp.float32] * 2
    assert out[0].tolist() == [8, 8]
    assert float(out[1]) == 24


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_python_float_is_scaled(kind):
    # jmp and flax scale them; to return it unscaled would be a silent error.
    scale = {"static": optax_mp.StaticLossScale, "dynamic": optax_mp.DynamicLossScale}
    assert float(scale[kind](8.0).scale(3.0)) == 24
    assert float(scale[kind](8.0).unscale(24.0)) == 3


def test_the_largest_float16_times_65536_is_finite():
    loss = jnp.float16(65504)
    scale = optax_mp.DynamicLossScale(2.0**16)
    assert float(scale.scale(loss)) == 65504 * 65536
    assert float(scale.unscale(scale.scale(loss))) == 65504


@pytest.mark.parametrize("factor", [3.0, 0.1, 2.0**16, SMALLEST, LARGEST])
def test_unscale_takes_scale_back(factor):
    scale = optax_mp.StaticLossScale(factor)
    x = jnp.array([1.0, -1.7, 1.2345])
    back = scale.unscale(scale.scale(x))
    # Two roundings, of the product and of the reciprocal; none for powers of two.
    exact = np.frexp(factor)[0] == 0.5
    np.testing.assert_allclose(back, x, rtol=0 if exact else 3e-7)


def test_no_scaling_returns_the_tree_itself():
    value, tree = optax_mp.NoOpLossScale(), {"a": jnp.ones(2, jnp.float16), "b": 3}
    assert value.scale(tree) is tree
    assert value.unscale(tree) is tree
    assert value.adjust(jnp.array(False)) is value
    assert value.loss_scale == 1


def test_a_static_value_stays_at_an_overflow():
    assert float(optax_mp.StaticLossScale(8.0).adjust(False).loss_scale) == 8


NUMBERS = {
    "float16": np.float16(1024),
    "float64": np.float64(1024),
    "int": 1024,
    "int32": np.int32(1024),
    "jax float16": jnp.float16(1024),
    "jax bfloat16": jnp.bfloat16(1024),
    "jax int": jnp.int32(1024),
    "0-d array": np.array(1024.0),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("cls", [optax_mp.StaticLossScale, optax_mp.DynamicLossScale])
def test_a_factor_of_any_dtype_becomes_float32(cls, name):
    value = cls(NUMBERS[name])
    plain = cls(1024.0)
    assert value.loss_scale.dtype == jnp.float32
    assert avals(value) == avals(plain)
    assert as_bits(value.adjust(False)) == as_bits(plain.adjust(False))


def test_a_float16_factor_grows_past_float16():
    scale = optax_mp.DynamicLossScale(np.float16(2.0**15), period=1)
    scales, _ = run_values(scale, np.ones(3, bool))
    assert scales.tolist() == [2.0**16, 2.0**17, 2.0**18]


@pytest.mark.parametrize("name", ["float16", "int", "jax bfloat16"])
def test_init_scale_of_any_dtype_becomes_float32(name):
    state = optax_mp.dynamic_loss_scale(init_scale=NUMBERS[name]).init(jnp.ones(2))
    assert avals(state) == avals(optax_mp.dynamic_loss_scale().init(jnp.ones(2)))
    assert state.scale == 1024


def test_a_value_may_be_made_under_jit():
    made = jax.jit(lambda x: optax_mp.DynamicLossScale(x, period=1).adjust(True))(8)
    assert made.loss_scale.dtype == jnp.float32
    assert made.loss_scale == 16


@pytest.mark.parametrize("finite", [True, False, np.bool_(True), jnp.array(False)])
def test_adjust_takes_any_bool(finite):
    scale = optax_mp.DynamicLossScale(8.0, period=1)
    want = 16 if finite else 4
    assert scale.adjust(finite).loss_scale == want
    assert jax.jit(lambda s, f: s.adjust(f))(scale, finite).loss_scale == want


def test_a_stack_of_loss_scales_under_vmap_moves_each_by_itself():
    stack = jax.vmap(
        lambda x: optax_mp.DynamicLossScale(x, period=1, min_loss_scale=0.5)
    )(jnp.array([1.0, 8.0, 64.0, 0.5]))
    finite = jnp.array([True, False, True, False])
    after = jax.vmap(lambda s, f: s.adjust(f))(stack, finite)
    assert after.loss_scale.tolist() == [2, 4, 128, 0.5]
    scaled = jax.vmap(lambda s, x: s.scale(x))(stack, jnp.full(4, 3.0, jnp.float16))
    assert scaled.tolist() == [3, 24, 192, 1.5]
    unscaled = jax.vmap(lambda s, x: s.unscale(x))(stack, scaled)
    assert unscaled.tolist() == [3] * 4


# Bad input

NAN, INF = float("nan"), float("inf")
POSITIVE = "expected a positive finite float32"
WHOLE = "expected an integer greater than 0"


def makers():
    """Return every way to give a scale: caller, name of the argument, function."""
    return [
        ("dynamic_loss_scale", "init_scale", optax_mp.dynamic_loss_scale),
        ("dynamic_loss_scale", "min_scale", optax_mp.dynamic_loss_scale),
        ("dynamic_loss_scale", "max_scale", optax_mp.dynamic_loss_scale),
        ("static_loss_scale", "scale", optax_mp.static_loss_scale),
        ("StaticLossScale", "loss_scale", optax_mp.StaticLossScale),
        ("DynamicLossScale", "loss_scale", optax_mp.DynamicLossScale),
        (
            "DynamicLossScale",
            "min_loss_scale",
            lambda **kwargs: optax_mp.DynamicLossScale(8.0, **kwargs),
        ),
    ]


MAKERS = pytest.mark.parametrize(
    ("caller", "name", "make"), makers(), ids=[f"{c}-{n}" for c, n, _ in makers()]
)


@MAKERS
@pytest.mark.parametrize("bad", [0, 0.0, -1.0, NAN, INF, -INF, 1e39, 1e-39])
def test_a_scale_that_is_no_normal_float32_is_named(caller, name, make, bad):
    with pytest.raises(ValueError, match=f"^{caller}: `{name}` is .*{POSITIVE}"):
        make(**{name: bad})


@MAKERS
@pytest.mark.parametrize("bad", [np.float32(NAN), jnp.float32(0), np.float16(0)])
def test_a_bad_scale_that_is_an_array_is_named(caller, name, make, bad):
    with pytest.raises(ValueError, match=f"^{caller}: `{name}` is .*{POSITIVE}"):
        make(**{name: bad})


NUMBERS_BY_NAME = [
    *makers(),
    *[
        ("dynamic_loss_scale", name, optax_mp.dynamic_loss_scale)
        for name in (
            "growth_interval",
            "growth_factor",
            "backoff_factor",
            "hysteresis",
        )
    ],
    *[
        (
            "DynamicLossScale",
            name,
            lambda **kwargs: optax_mp.DynamicLossScale(8.0, **kwargs),
        )
        for name in ("counter", "period", "factor")
    ],
]
NO_NUMBERS = {
    "string": "8.0",
    "None": None,
    "array": np.array([2.0, 4.0]),
    "list": [2.0],
    "complex": 2j,
}


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize(
    ("caller", "name", "make"),
    NUMBERS_BY_NAME,
    ids=[f"{c}-{n}" for c, n, _ in NUMBERS_BY_NAME],
)
def test_what_is_no_number_is_named(caller, name, make, bad):
    with pytest.raises((ValueError, TypeError), match=f"{caller}: `{name}` is "):
        make(**{name: NO_NUMBERS[bad]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(growth_interval=0), f"`growth_interval` is 0, {WHOLE}"),
        (dict(growth_interval=-5), f"`growth_interval` is -5, {WHOLE}"),
        (dict(growth_interval=2.5), f"`growth_interval` is 2.5, {WHOLE}"),
        (dict(growth_interval=NAN), f"`growth_interval` is nan, {WHOLE}"),
        (dict(growth_interval=INF), f"`growth_interval` is inf, {WHOLE}"),
        (dict(hysteresis=0), f"`hysteresis` is 0, {WHOLE}"),
        (dict(hysteresis=-1), f"`hysteresis` is -1, {WHOLE}"),
        (dict(hysteresis=1.5), f"`hysteresis` is 1.5, {WHOLE}"),
        (dict(hysteresis=INF), f"`hysteresis` is inf, {WHOLE}"),
        (dict(growth_factor=1), "`growth_factor` is 1, expected a finite number greater than 1"),
        (dict(growth_factor=0.5), "`growth_factor` is 0.5, expected a finite"),
        (dict(growth_factor=INF), "`growth_factor` is inf, expected a finite"),
        (dict(growth_factor=NAN), "`growth_factor` is nan, expected a finite"),
        (dict(backoff_factor=1), "`backoff_factor` is 1, expected a number between 0 "),
        (dict(backoff_factor=0), "`backoff_factor` is 0, expected a number between 0 "),
        (dict(backoff_factor=2.0), "`backoff_factor` is 2.0, expected a number betwee"),
        (dict(backoff_factor=-0.5), "`backoff_factor` is -0.5, expected a number betw"),
        (dict(backoff_factor=NAN), "`backoff_factor` is nan, expected a number betwee"),
        (
            dict(min_scale=4.0, max_scale=2.0),
            "`min_scale` is 4.0, expected at most `max_scale`, which is 2.0",
        ),
        (
            dict(init_scale=2.0**25),
            r"`init_scale` is 33554432.0, expected a scale from `min_scale` "
            r"6.1\S* to `max_scale` 16777216.0; change",
        ),
        (
            dict(init_scale=0.25, min_scale=0.5),
            "`init_scale` is 0.25, expected a scale from `min_scale` 0.5 to ",
        ),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^dynamic_loss_scale: {message}"):
        optax_mp.dynamic_loss_scale(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(period=0), f"`period` is 0, {WHOLE}"),
        (dict(period=-5), f"`period` is -5, {WHOLE}"),
        (dict(period=2.5), f"`period` is 2.5, {WHOLE}"),
        (dict(period=NAN), f"`period` is nan, {WHOLE}"),
        (dict(period=INF), f"`period` is inf, {WHOLE}"),
        (dict(factor=1.0), "`factor` is 1.0, expected a finite number greater than 1"),
        (dict(factor=0.0), "`factor` is 0.0, expected a finite number greater than 1"),
        (dict(factor=0.5), "`factor` is 0.5, expected a finite number greater than 1"),
        (dict(factor=INF), "`factor` is inf, expected a finite number greater than 1"),
        (dict(factor=NAN), "`factor` is nan, expected a finite number greater than 1"),
        (
            dict(min_loss_scale=16.0),
            "`loss_scale` is 8.0, expected at least `min_loss_scale`, which is 16.0",
        ),
    ],
)
def test_a_setting_of_a_value_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^DynamicLossScale: {message}"):
        optax_mp.DynamicLossScale(8.0, **settings)


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis"])
def test_a_whole_float_is_an_integer(name):
    settings = {name: 2.0, "init_scale": 8.0}
    state = run_link(optax_mp.dynamic_loss_scale(**settings), np.array([False, True]))
    assert avals(state)[1][:5] == avals(
        run_link(optax_mp.dynamic_loss_scale(), np.array([False, True]))
    )[1][:5]  # fmt: skip
    assert state.scale[0] == (8 if name == "hysteresis" else 4)


def test_an_interval_past_int32_never_grows():
    tx = optax_mp.dynamic_loss_scale(growth_interval=2**40)
    assert run_link(tx, np.ones(3, bool)).scale.tolist() == [2.0**16] * 3


@pytest.mark.parametrize("factory", ["dynamic_loss_scale", "static_loss_scale"])
@pytest.mark.parametrize("inner", [0.1, "adam", optax.adam, 8])
def test_an_inner_that_is_no_transformation_is_named(factory, inner):
    expected = f"^{factory}: `inner` is a .*, expected an optax gradient transformation"
    with pytest.raises(TypeError, match=expected):
        getattr(optax_mp, factory)(inner)


@pytest.mark.parametrize("factory", ["dynamic_loss_scale", "static_loss_scale"])
def test_a_state_of_another_optimizer_is_named(factory):
    tx = getattr(optax_mp, factory)(optax.sgd(0.1))
    with pytest.raises(
        TypeError, match=f"{factory}: `state` is a .* expected the Loss"
    ):
        tx.update(jnp.ones(2), optax.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))
