"""Loss scales as plain values."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import as_bits
from jax import lax
from reference import LossScaleRule, scale_trace
from scale_traces import LARGEST, random_finite, run_values

import optax_mp

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
def test_a_scale_is_float32_with_64_bit_types_on():
    scale = optax_mp.DynamicLossScale(jnp.float64(8), counter=jnp.int64(1), period=2)
    after = scale.adjust(True)
    for value in (scale, after):
        assert value.loss_scale.dtype == jnp.float32
        assert value.counter.dtype == jnp.int32
    assert after.loss_scale == 16


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_python_float_is_scaled(kind):
    # jmp and flax scale them; to return it unscaled would be a silent error.
    scale = {"static": optax_mp.StaticLossScale, "dynamic": optax_mp.DynamicLossScale}
    assert float(scale[kind](8.0).scale(3.0)) == 24
    assert float(scale[kind](8.0).unscale(24.0)) == 3


def test_no_scaling_returns_the_tree_itself():
    value, tree = optax_mp.NoOpLossScale(), {"a": jnp.ones(2, jnp.float16), "b": 3}
    assert value.scale(tree) is tree
    assert value.unscale(tree) is tree
    assert value.adjust(jnp.array(False)) is value
    assert value.loss_scale == 1
