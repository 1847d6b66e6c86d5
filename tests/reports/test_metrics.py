"""metrics: the scalars of any optimizer state, by names that stay."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from reference import LossScaleRule
from scaled_losses import LABELS, NESTINGS, NO_SCALE, PARAMS, scaler
from slow_cases import mostly_slow

import optax_mp

OF_A_SCALE = {
    "loss_scale": jnp.float32,
    "finite_count": jnp.int32,
    "skipped_count": jnp.int32,
    "total_skipped_count": jnp.int32,
    "last_finite": jnp.bool_,
    "skipped_by_loss": jnp.bool_,
    "at_min_scale": jnp.bool_,
}
STEPS = {"step_count": jnp.int32}


def dtypes(found):
    assert all(value.shape == () for value in found.values())
    return {name: value.dtype for name, value in found.items()}


@mostly_slow("nesting", NESTINGS, lambda name: name == "masked")
def test_metrics_are_found_in(nesting):
    tx = NESTINGS[nesting]()
    state = tx.init(PARAMS)
    found = optax_mp.metrics(state)
    rate = {"learning_rate": jnp.float32} if nesting == "inject_hyperparams" else {}
    assert dtypes(found) == OF_A_SCALE | STEPS | rate
    assert found["loss_scale"] == 1024 and found["last_finite"]
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    for _ in range(2):
        state = jax.jit(tx.update)(grads, state, PARAMS)[1]
    jitted = jax.jit(optax_mp.metrics)(state)
    assert dtypes(jitted) == OF_A_SCALE | STEPS | rate
    assert jitted["finite_count"] == jitted["step_count"] == 2
    # A dict that leaves `jit` is sorted.
    assert list(optax_mp.metrics(state)) == [*OF_A_SCALE, *STEPS, *rate]


def test_metrics_are_arrays_of_their_own():
    """The state may be donated to the next step, and they are still there."""
    state = scaler().init(PARAMS)
    found = optax_mp.metrics(state)
    for array in jax.tree.leaves(state):
        array.delete()
    assert not any(array.is_deleted() for array in found.values())


def test_metrics_are_the_counters_of_plain_python():
    rule = LossScaleRule(2.0**16, growth_interval=3)
    inner = optax_mp.mixed_precision(optax.adam(0.1), storage=optax_mp.Split())
    tx = optax_mp.dynamic_loss_scale(inner, growth_interval=3)
    params = {"w": jnp.ones(2, jnp.bfloat16)}

    @jax.jit
    def step(state, value):
        grads = {"w": jnp.full(2, value, jnp.float32)}
        state = tx.update(grads, state, params)[1]
        return state, optax_mp.metrics(state)

    state, steps = tx.init(params), 0
    for value in (1.0, math.inf, math.nan, 1.0, 2.0, 3.0, -math.inf):
        state, found = step(state, value)
        finite = math.isfinite(value)
        rule.step("." if finite else "x")
        steps += finite
        assert {name: float(x) for name, x in found.items()} == {
            "loss_scale": rule.scale,
            "finite_count": rule.finite_count,
            "skipped_count": rule.skipped_count,
            "total_skipped_count": rule.total_skipped_count,
            "last_finite": finite,
            "skipped_by_loss": False,
            "at_min_scale": False,
            "step_count": steps,
        }


@pytest.mark.parametrize("state", [(), None, {}, optax.sgd(0.1).init(PARAMS)])
def test_where_there_is_nothing_there_are_no_metrics(state):
    assert optax_mp.metrics(state) == {}


def test_without_a_loss_scale_steps_are_counted():
    assert dtypes(optax_mp.metrics(NO_SCALE)) == STEPS
    tx = optax.chain(optax.adam(0.1), optax.scale_by_schedule(lambda count: 1.0))
    state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)[1]
    assert optax_mp.metrics(state)["step_count"] == 1


MULTI_STEPS = {
    "low_bit_state": optax_mp.low_bit_state,
    "stochastic_rounding": optax_mp.stochastic_rounding,
    "mixed_precision": optax_mp.mixed_precision,
    "loss scale": lambda tx: optax_mp.static_loss_scale(optax_mp.low_bit_state(tx)),
    "chain": lambda tx: optax.chain(optax.scale_by_schedule(lambda n: 1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
}


@pytest.mark.parametrize("around", MULTI_STEPS)
def test_optimizer_steps_are_counted_not_micro_steps(around):
    tx = MULTI_STEPS[around](
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()
    )
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(5):
        state = update({"w": jnp.ones(4)}, state, params)[1]
    assert optax_mp.metrics(state)["step_count"] == 2


SEVERAL = {
    "partition": (
        lambda: optax.partition({"x": scaler(8.0), "y": scaler(4.0)}, LABELS),
        {"x/loss_scale": 8, "y/loss_scale": 4},
    ),
    "one in another": (
        lambda: optax_mp.static_loss_scale(scaler(4.0), 8.0),
        {"loss_scale": 8, "inner_state/loss_scale": 4},
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_loss_scales_have_distinct_names(name):
    make, expected = SEVERAL[name]
    state = make().init(PARAMS)
    found = optax_mp.metrics(state)
    scales = {name: x for name, x in found.items() if name.endswith("loss_scale")}
    assert scales == expected
    assert len(found) == 16
    assert list(found) == list(optax_mp.metrics(jax.tree.map(jnp.ones_like, state)))


def test_counts_that_do_not_count_steps_are_left_out():
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    assert optax_mp.metrics(plateau.init(jnp.ones(2))) == {}
    schedule_free = optax.contrib.schedule_free(optax.adam(0.1), 0.1)
    assert optax_mp.metrics(schedule_free.init(jnp.ones(2))) == {"step_count": 0}


def test_injected_hyperparameters_are_metrics():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=schedule, b1=0.5)
    tx = optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(adam))
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    state = tx.init(params)
    rates = []
    for _ in range(3):
        state = tx.update({"w": jnp.ones(2)}, state, params)[1]
        found = jax.jit(optax_mp.metrics)(state)
        rates.append(float(found["learning_rate"]))
    assert rates == [1.0, 0.75, 0.5]
    assert found["b1"] == 0.5 and found["step_count"] == 3
    assert all(value.shape == () for value in found.values())


@pytest.mark.parametrize("value", [PARAMS, jnp.ones(3)])
def test_arrays_that_are_hardly_a_state_are_warned_of(value):
    with pytest.warns(
        optax_mp.MixedPrecisionWarning, match=r"metrics: .*nothing looks like an"
    ):
        assert optax_mp.metrics(value) == {}


@pytest.mark.parametrize("value", [optax.adam(0.1), "state", 3])
def test_what_is_no_state_is_an_error(value):
    with pytest.raises(
        TypeError, match=r"metrics: expected `opt_state` to be .*`tx.init\(params\)`"
    ):
        optax_mp.metrics(value)
