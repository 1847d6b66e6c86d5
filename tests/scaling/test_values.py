"""Loss scales as plain values. How they move: test_rule.py."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import as_bits
from jax import lax

import optax_mp

# No field is at its default, and the floor is under 1.
SCALES = {
    "static": optax_mp.StaticLossScale(0.75),
    "dynamic": optax_mp.DynamicLossScale(
        24.0, counter=3, period=7, factor=3.0, min_loss_scale=2.0**-10
    ),
}
FIELDS = ("loss_scale", "counter", "period", "factor", "min_loss_scale")


def through_jax(value):
    """Return a value after loops, a branch, `vmap` and a copy to the host, in one jit."""

    @jax.jit
    def run(value):
        value = lax.scan(lambda c, _: (c, None), value, None, length=2)[0]
        value = lax.while_loop(lambda _: False, lambda x: x, value)
        value = lax.cond(True, lambda x: x, lambda x: x, value)
        stack = jax.tree.map(lambda x: jnp.stack([x, x]), value)
        return jax.tree.map(lambda x: x[1], jax.vmap(lambda x: x)(stack))

    return jax.device_get(run(value))


TRIPS = {
    "jax": through_jax,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("kind", SCALES)
def test_no_field_is_lost_on_the_way_through(kind):
    value = SCALES[kind]
    for trip in TRIPS.values():
        back = trip(value)
        assert type(back) is type(value)
        for name in FIELDS:
            assert getattr(back, name, None) == getattr(value, name, None)
        assert as_bits(back) == as_bits(value)


@pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])
def test_floats_are_scaled_in_float32(kind):
    value = getattr(optax_mp, kind)(2.0**16)
    want = np.array([0.5, -3.0, 1.75], np.float32)
    dtypes = ("float16", "bfloat16", "float32", "float8_e5m2")
    tree = {dtype: jnp.asarray(want, dtype) for dtype in dtypes}
    for out, factor in ((value.scale(tree), 2.0**16), (value.unscale(tree), 2.0**-16)):
        for leaf in out.values():
            assert leaf.dtype == jnp.float32
            np.testing.assert_array_equal(leaf, want * factor)
    # jmp and flax scale them; to return it unscaled would be a silent error.
    assert float(value.scale(3.0)) == 3 * 2.0**16


@pytest.mark.usefixtures("x64")
def test_a_scale_is_float32_with_64_bit_types_on():
    scale = optax_mp.DynamicLossScale(jnp.float64(8), counter=jnp.int64(1), period=2)
    after = scale.adjust(True)
    for value in (scale, after):
        assert value.loss_scale.dtype == jnp.float32
        assert value.counter.dtype == jnp.int32
    assert after.loss_scale == 16


def test_no_scaling_returns_the_tree_itself():
    value, tree = optax_mp.NoOpLossScale(), {"a": jnp.ones(2, jnp.float16), "b": 3}
    assert value.scale(tree) is tree
    assert value.unscale(tree) is tree
    assert value.adjust(jnp.array(False)) is value
    assert value.loss_scale == 1
