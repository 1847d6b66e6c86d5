"""check_loss_scale: what it accepts, and what its error says."""

import jax
import jax.numpy as jnp
import optax
import pytest
from scaled_losses import NESTINGS, NO_SCALE, PARAMS
from slow_cases import mostly_slow

import optax_mp


def skipped(times, tx=None, after_finite=0):
    """Return the state after so many good, then bad, steps, and the last gradients."""
    tx = tx or optax_mp.dynamic_loss_scale(optax.sgd(0.1), init_scale=1024.0)
    state = tx.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    update = jax.jit(tx.update)
    for _ in range(after_finite):
        state = update(grads, state, PARAMS)[1]
    grads = dict(grads, a=jnp.array([0.0, jnp.nan, 1.0])) if times else grads
    for _ in range(times):
        state = update(grads, state, PARAMS)[1]
    return state, grads


@pytest.mark.parametrize("times", [0, 1, 3])
def test_check_passes_up_to_max_skipped(times):
    state, grads = skipped(times)
    assert state.skipped_count == times
    assert optax_mp.check_loss_scale(state, max_skipped=3, grads=grads) is None


def test_check_raises_past_max_skipped_with_the_counters():
    state, _ = skipped(4)
    expected = (
        r"^check_loss_scale: 4 steps in a row .* \(allowed: 3; skipped since `init`: 4\), "
        r".* down to 64\. .*NaN or infinity of the model .* optax_mp.nonfinite_paths\(grads\)"
    )
    with pytest.raises(FloatingPointError, match=expected):
        optax_mp.check_loss_scale(state, max_skipped=3)


def test_check_tells_the_total_apart():
    state, _ = skipped(2)
    state = state._replace(total_skipped_count=jnp.int32(7))
    with pytest.raises(
        FloatingPointError, match="2 steps in a row.*allowed: 1; skipped .*: 7"
    ):
        optax_mp.check_loss_scale(state, max_skipped=1)


def test_check_allows_thirty_by_default():
    state, _ = skipped(1)
    optax_mp.check_loss_scale(state._replace(skipped_count=jnp.int32(30)))
    with pytest.raises(FloatingPointError, match=r"31 steps .*allowed: 30"):
        optax_mp.check_loss_scale(state._replace(skipped_count=jnp.int32(31)))


def test_thirty_skips_take_the_default_scale_to_its_floor():
    state, _ = skipped(30, optax_mp.dynamic_loss_scale(optax.sgd(0.1)))
    assert state.scale == 2.0**-14


def test_check_passes_after_a_finite_step():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
    state, _ = skipped(4, tx)
    state = tx.update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)[1]
    optax_mp.check_loss_scale(state, max_skipped=0)
    assert state.total_skipped_count == 4


def test_check_names_the_leaves_of_grads():
    state, grads = skipped(2)
    with pytest.raises(FloatingPointError, match=r"Leaves: \['a'\]\.$"):
        optax_mp.check_loss_scale(state, max_skipped=1, grads=grads)


def test_check_says_if_grads_are_finite():
    state, _ = skipped(2)
    with pytest.raises(FloatingPointError, match="Leaves: none in `grads`"):
        optax_mp.check_loss_scale(state, max_skipped=1, grads=PARAMS)


@pytest.mark.parametrize("state", [NO_SCALE, (), {"a": jnp.ones(2)}])
def test_check_without_a_loss_scale_says_so(state):
    expected = "^check_loss_scale: `opt_state` holds no loss scale, expected the state"
    with pytest.raises(ValueError, match=expected):
        optax_mp.check_loss_scale(state)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_check_sees_the_skips_of(nesting):
    state, grads = skipped(2, NESTINGS[nesting]())
    optax_mp.check_loss_scale(state, max_skipped=2)
    with pytest.raises(FloatingPointError, match=r"2 steps .* down to 1024.*\['a'\]"):
        optax_mp.check_loss_scale(state, max_skipped=1, grads=grads)


@mostly_slow("nesting", NESTINGS, lambda nesting: nesting in ("alone", "deep"))
def test_check_finds_the_state_in(nesting):
    state, _ = skipped(0, NESTINGS[nesting](), after_finite=1)
    optax_mp.check_loss_scale(state, max_skipped=0)
    with pytest.raises(FloatingPointError, match="0 steps in a row"):
        optax_mp.check_loss_scale(state, max_skipped=-1)
