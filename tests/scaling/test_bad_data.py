"""Bad data is no overflow: it does not lower the scale, and a scale at its floor is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_mp
from optax_mp.core.scaling._state import is_at_floor, is_skipped_by_loss

STEPS, ROWS, START = 600, 16, 2.0**13
RNG = np.random.default_rng(0)
TARGET = RNG.normal(size=8).astype(np.float32) / 3
PARAMS = {
    "in": RNG.normal(size=(8, 16)).astype(np.float16) / 3,
    "out": RNG.normal(size=16).astype(np.float16) / 4,
}
ROWS_WITH_NANS = RNG.normal(size=(STEPS, ROWS, 8)).astype(np.float32)
ROWS_WITH_NANS[19::20, 0] = np.nan


def loss(params, x):
    found = jnp.tanh(x.astype(jnp.float16) @ params["in"]) @ params["out"]
    error = found.astype(jnp.float32) - jnp.tanh(x @ TARGET)
    return jnp.mean(error**2)


TX = optax_mp.dynamic_loss_scale(
    optax_mp.mixed_precision(optax.adam(1e-2)), init_scale=START
)
SCALED = optax_mp.value_and_grad(loss)


@jax.jit
def train(is_told):
    """Return (state, scales) after steps of which each twentieth has a bad row."""

    def step(carry, x):
        params, state = carry
        value, grads = SCALED(state, params, x)
        # With a finite value the rule is that of torch.
        value = jnp.where(is_told, value, 1.0)
        updates, state = TX.update(grads, state, params, value=value)
        return (optax.apply_updates(params, updates), state), state.scale

    params = jax.tree.map(jnp.asarray, PARAMS)
    (_, state), scales = lax.scan(step, (params, TX.init(params)), ROWS_WITH_NANS)
    return state, scales


def test_one_bad_batch_in_twenty_lowers_torchs_scale_to_its_floor_but_not_with_value():
    state, scales = train(is_told=False)
    assert scales[-1] == 2.0**-14
    assert is_at_floor(state)
    expected = (
        r"^check_loss_scale: the loss scale is at its floor.* The scale is 6\.10352e-05, "
        r"30 steps were skipped .* not finite was \['in'\]; pass .*value=loss.*min_scale`"
    )
    with pytest.raises(FloatingPointError, match=expected):
        optax_mp.check_loss_scale(state, params=PARAMS)

    state, scales = train(is_told=True)
    assert set(scales.tolist()) == {START}
    assert state.total_skipped_count == 30
    assert not is_at_floor(state)
    optax_mp.check_loss_scale(state)


@pytest.mark.parametrize(
    "make", [optax_mp.dynamic_loss_scale, optax_mp.static_loss_scale]
)
def test_the_state_and_the_check_say_whether_the_loss_or_the_scale_was_bad(make):
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = make(optax.sgd(0.1))
    state, update = tx.init(params), jax.jit(tx.update)
    good, bad = params, dict(params, b=jnp.array([1.0, jnp.inf]))
    told = []
    for grads, value in ((good, 1.0), (bad, jnp.inf), (good, 1.0), (bad, 1.0)):
        state = update(grads, state, params, value=value)[1]
        told.append((bool(state.last_finite), bool(is_skipped_by_loss(state))))
        if not told[-1][0]:
            with pytest.raises(FloatingPointError) as caught:
                optax_mp.check_loss_scale(state, max_skipped=0, params=params)
            by_loss = "since `init`, and in the last of them the loss was not finite"
            assert (by_loss in str(caught.value)) == told[-1][1]
            assert ("not finite was ['b']" in str(caught.value)) == (not told[-1][1])
    # What was told stays until another step is skipped.
    assert told == [(True, False), (False, True), (True, True), (False, False)]
    # A finite gradient is not skipped, whatever the loss is; without one nothing is known.
    state = update(good, tx.init(params), params, value=jnp.nan)[1]
    assert not is_skipped_by_loss(state)
    assert not is_skipped_by_loss(update(bad, state, params)[1])


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
    expected = "its floor.* The scale is 2, 1 steps .*lower `min_scale`"
    with pytest.raises(FloatingPointError, match=expected):
        optax_mp.check_loss_scale(state, params=params)


def test_ranks_agree_on_an_overflow_and_on_a_bad_loss():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(1.0), axis_name="data")
    params = {"w": jnp.ones(3)}
    state = tx.init(params)

    def update(grad, loss):
        return tx.update({"w": grad * params["w"]}, state, params, value=loss)[1]

    on_ranks = jax.jit(jax.vmap(update, axis_name="data"))
    bad = jnp.array([1, jnp.nan, 1])
    after = on_ranks(bad, bad)
    assert after.scale.tolist() == [2.0**16] * 3
    assert after.finite_count.tolist() == [0] * 3
    assert after.total_skipped_count.tolist() == [1] * 3
    assert is_skipped_by_loss(after).tolist() == [True] * 3
    assert on_ranks(bad, jnp.ones(3)).scale.tolist() == [2.0**15] * 3
