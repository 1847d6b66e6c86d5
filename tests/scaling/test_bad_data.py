"""Bad data is no overflow: it does not lower the scale, and a scale at its floor is told."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_mp

STEPS, ROWS, START = 600, 16, 2.0**13
RNG = np.random.default_rng(0)
TARGET = RNG.normal(size=8).astype(np.float32) / 3
PARAMS = {
    "in": RNG.normal(size=(8, 16)).astype(np.float16) / 3,
    "out": RNG.normal(size=16).astype(np.float16) / 4,
}
ALL_ROWS = RNG.normal(size=(STEPS, ROWS, 8)).astype(np.float32)
TEST_ROWS = RNG.normal(size=(2048, 8)).astype(np.float32)


def loss(params, x, weight):
    found = jnp.tanh(x.astype(jnp.float16) @ params["in"]) @ params["out"]
    error = found.astype(jnp.float32) - jnp.tanh(x @ TARGET)
    return jnp.mean(weight * error**2)


TX = optax_mp.dynamic_loss_scale(
    optax_mp.mixed_precision(optax.adam(1e-2)), init_scale=START
)
SCALED = optax_mp.value_and_grad(loss)
EACH = optax.microbatch(SCALED, (2, 3), ROWS // 8, optax_mp.gradient_accumulator())


def whole(params, state, x, weight, is_told):
    value, grads = SCALED(state, params, x, weight)
    # With a finite value the rule is that of torch.
    return grads, {"value": jnp.where(is_told, value, 1.0)}


def by_micro_batches(params, state, x, weight, _):
    (_, grads), dropped_count = EACH(state, params, x, weight)
    return grads, {"dropped_count": dropped_count}


def train(gradients, bad_every, weight=1.0, is_told=True):
    """Return (test loss, state, scales) after steps of which some have a bad row."""
    rows = ALL_ROWS.copy()
    rows[bad_every - 1 :: bad_every, 0] = np.nan
    return run(gradients, rows, weight, is_told)


@partial(jax.jit, static_argnums=0)
def run(gradients, rows, weight, is_told):
    def step(carry, x):
        params, state = carry
        weights = jnp.full(ROWS, weight)
        grads, says = gradients(params, state, x, weights, is_told)
        updates, state = TX.update(grads, state, params, **says)
        return (optax.apply_updates(params, updates), state), state.scale

    params = jax.tree.map(jnp.asarray, PARAMS)
    start = params, TX.init(params)
    (params, state), scales = lax.scan(step, start, rows)
    return loss(params, TEST_ROWS, 1.0), state, scales


def test_one_bad_batch_in_twenty_lowers_torchs_scale_to_its_floor_but_not_with_value():
    _, state, scales = train(whole, 20, is_told=False)
    assert scales[-1] == 2.0**-14
    assert optax_mp.metrics(state)["at_min_scale"]
    expected = (
        r"overflowed at the lower bound .* \(skipped since `init`: 30\), .* down to "
        r"6\.10352e-05\. Only gradients over 1\.07e\+09 overflow .* so this is a NaN or "
        r"infinity of the model or its data.*value=loss.* The first leaf.* \['in'\]"
    )
    with pytest.raises(FloatingPointError, match=expected):
        optax_mp.check_loss_scale(state, params=PARAMS)

    _, state, scales = train(whole, 20)
    assert set(scales.tolist()) == {START}
    assert state.total_skipped_count == 30
    assert not optax_mp.metrics(state)["at_min_scale"]
    optax_mp.check_loss_scale(state)


def test_a_loss_may_be_a_number_of_python():
    tx, params = (
        optax_mp.dynamic_loss_scale(optax.sgd(0.1)),
        {"w": jnp.full(2, jnp.nan)},
    )
    _, state = tx.update(params, tx.init(params), params, value=float("nan"))
    assert state.scale == 2.0**16


def test_an_overflow_at_a_floor_of_one_may_be_the_model():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0, min_scale=2.0)
    params = {"w": jnp.ones(2)}
    bad = {"w": jnp.array([1.0, jnp.inf])}
    state = tx.update(bad, tx.init(params), params, value=1.0)[1]
    with pytest.raises(FloatingPointError, match="loss is finite .* lower `min_scale`"):
        optax_mp.check_loss_scale(state, params=params)


def test_one_bad_micro_batch_in_each_step_keeps_the_scale_and_is_counted():
    found, state, scales = train(by_micro_batches, 1)
    clean, *_ = train(by_micro_batches, STEPS + 1)
    assert set(scales.tolist()) == {START}
    metrics = optax_mp.metrics(state)
    assert metrics["dropped_count"] == STEPS
    assert metrics["total_skipped_count"] == 0 and metrics["last_finite"]
    assert found < 1.3 * clean


def test_micro_batches_that_all_overflow_shrink_the_scale():
    _, state, scales = train(by_micro_batches, STEPS + 1, 1e4)
    assert scales[0] == START / 2 and 1 <= scales[-1] <= 16
    assert state.total_skipped_count >= 9
    assert state.dropped_count >= 8 * state.total_skipped_count


def test_ranks_agree_on_dropped_micro_batches_and_on_a_bad_loss():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(1.0), axis_name="data")
    params = {"w": jnp.ones(3)}
    state = tx.init(params)

    def update(grad, says):
        return tx.update({"w": grad * params["w"]}, state, params, **says)[1]

    on_ranks = jax.jit(jax.vmap(update, axis_name="data"))
    after = on_ranks(jnp.ones(3), {"dropped_count": jnp.array([0, 2, 0])})
    assert after.scale.tolist() == [2.0**16] * 3
    assert after.dropped_count.tolist() == [2] * 3
    assert after.finite_count.tolist() == [0] * 3
    bad = jnp.array([1, jnp.nan, 1])
    assert on_ranks(bad, {"value": bad}).scale.tolist() == [2.0**16] * 3
    assert on_ranks(bad, {"value": jnp.ones(3)}).scale.tolist() == [2.0**15] * 3


def test_a_count_that_is_misspelt_forgotten_or_for_no_scale_is_told():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    masters = optax_mp.mixed_precision(optax.sgd(0.1))
    tx = optax_mp.dynamic_loss_scale(masters)
    state = tx.init(params)
    expected = (
        "^dynamic_loss_scale: expected .* as `dropped_count`, got `dropped`; pass"
    )
    with pytest.raises(TypeError, match=expected):
        tx.update(params, state, params, dropped=0)
    alone = masters.init(params)
    with pytest.warns(
        optax_mp.MixedPrecisionWarning, match="takes `dropped_count`, got"
    ):
        masters.update(params, alone, params, dropped_count=0)
    around = optax_mp.mixed_precision(optax_mp.dynamic_loss_scale(optax.sgd(0.1)))
    around.update(params, around.init(params), params, dropped_count=0)
    jax.jit(tx.update)(params, state, params)
    accumulator = optax_mp.gradient_accumulator()
    accumulator.finalize(accumulator.init(params))
    with pytest.warns(
        optax_mp.MixedPrecisionWarning, match="`dropped_count` is not giv"
    ):
        jax.jit(lambda *args: tx.update(*args))(params, state, params)
