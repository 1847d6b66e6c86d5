"""check_loss_scale: what it accepts, and what its error says."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from scaled_losses import NO_SCALE, PARAMS, quadratic
from slow_cases import mostly_slow

import optax_mp


def after(tx, params, grads, steps=1):
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        state = update(grads, state, params)[1]
    return state


def skipped(times, tx=None):
    """Return the state after so many bad steps, and the gradients of these."""
    tx = tx or optax_mp.dynamic_loss_scale(optax.sgd(0.1), init_scale=1024.0)
    grads = dict(PARAMS, a=jnp.array([0.0, jnp.nan, 1.0]))
    return after(tx, PARAMS, grads, times), grads


def test_check_raises_past_max_skipped_with_the_counters():
    state, grads = skipped(4)
    assert state.skipped_count == 4
    assert optax_mp.check_loss_scale(state, max_skipped=4, grads=grads) is None
    expected = (
        r"^check_loss_scale: 4 steps in a row were skipped, over 3\. The scale is 64, 4 "
        r"steps were skipped since `init`, .* not finite was number 0 of those .*; look "
        r"for a NaN of the model .* raise `max_skipped`\.$"
    )
    with pytest.raises(FloatingPointError, match=expected):
        optax_mp.check_loss_scale(state, max_skipped=3)


def test_check_without_a_loss_scale_passes():
    """So that a loop need not know in which precision it runs."""
    for state in (NO_SCALE, ()):
        optax_mp.check_loss_scale(state, max_skipped=0, params=PARAMS)


# Which leaf, and why


def error_of(state, **settings):
    with pytest.raises(FloatingPointError) as caught:
        optax_mp.check_loss_scale(state, max_skipped=0, **settings)
    return str(caught.value)


GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])
MIXED = {"a": GOOD, "frozen": jnp.int32(1), "n": None, "x": {"y": GOOD, "z": GOOD}}


def test_the_first_leaf_is_named_that_was_not_finite_in_the_last_skipped_step():
    params = optax_mp.cast_floating(MIXED, "bfloat16")
    masters = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.Split())
    tx = optax_mp.dynamic_loss_scale(masters)
    state, names = tx.init(params), []
    update = jax.jit(tx.update)
    assert state.nonfinite_index == -1
    for bad in ("z", None, "y", None):
        x = {name: BAD if name == bad else GOOD for name in "yz"}
        # No gradient for what is not floating, as `value_and_grad` has it.
        grads = {"a": GOOD, "frozen": None, "n": None, "x": x}
        state = update(grads, state, params)[1]
        names.append(error_of(state._replace(skipped_count=1), params=params))
    found = [name.split("not finite was ")[1].split("; ")[0] for name in names]
    assert found == ["['x']['z']", "['x']['z']", "['x']['y']", "['x']['y']"]
    assert "not finite was ['x']['y'];" in error_of(
        state._replace(skipped_count=1), grads=grads
    )


def test_a_leaf_is_named_by_its_number_if_a_mask_hides_others():
    scaler = optax_mp.static_loss_scale(optax.sgd(0.1))
    tx = optax.masked(scaler, {"a": False, "b": True})
    params = {"a": GOOD, "b": GOOD}
    state = after(tx, params, {"a": GOOD, "b": BAD})
    assert "not finite was number 1 of those that the" in error_of(state, params=params)


@mostly_slow("shape", [(3,), (2, 3)], lambda shape: shape == (2, 3))
def test_of_states_with_leading_axes_the_member_that_skips_most_is_named(shape):
    tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
    params = {"a": jnp.ones((*shape, 2)), "b": jnp.ones((*shape, 2))}
    grads = jax.tree.map(jnp.ones_like, params)
    grads["b"] = grads["b"].at[..., 1, 0].set(jnp.nan)
    init, update = tx.init, tx.update
    for _ in shape:
        init, update = jax.vmap(init), jax.vmap(update)
    state = jax.jit(init)(params)
    optax_mp.check_loss_scale(state, params=params)
    state = jax.jit(update)(grads, state, params)[1]
    optax_mp.check_loss_scale(state, 1, params=params, grads=grads)
    member = [1] if len(shape) == 1 else [1, 1]  # of equal members the last
    error = error_of(state, params=params)
    assert f"1 steps in a row of member {member} were skipped, over 0. The" in error
    assert "was ['b'];" in error and "was ['b'];" in error_of(state, grads=grads)
    # One at its floor comes first, even if another has skipped more.
    floors = state.hysteresis_left.at[(0,) * len(shape)].set(-1)
    state = state._replace(hysteresis_left=floors, skipped_count=0 * floors + 1)
    expected = r"loss scale of member \[0.*\] is at its floor"
    with pytest.raises(FloatingPointError, match=expected):
        optax_mp.check_loss_scale(state)


def loss(params):
    return 0.2 * quadratic(params)


BY_HAND = {
    "clipped": (lambda grads: optax.clip_by_global_norm(1.0).update(grads, ())[0], 1),
    "unscaled": (lambda grads: jax.tree.map(lambda g: g / 2.0**16, grads), 1),
    "never scaled": (lambda grads: jax.grad(loss)(PARAMS), 1),
    "as they are": (lambda grads: grads, 0),
    "zero": (lambda grads: jax.tree.map(jnp.zeros_like, grads), 0),
    "not finite": (lambda grads: jax.tree.map(lambda g: g * jnp.nan, grads), 0),
}


def test_gradients_that_are_no_longer_scaled_are_warned_of():
    state = optax_mp.dynamic_loss_scale(optax.sgd(0.1)).init(PARAMS)
    scaled = optax_mp.value_and_grad(loss)(state, PARAMS)[1]
    for way, (change, count) in BY_HAND.items():
        grads = change(scaled)
        for given in (grads, optax.tree.norm(grads)):  # a step may return the norm
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optax_mp.check_loss_scale(state, grads=given)
            assert len(caught) == count, way
            assert all("for the unscaled gradients" in str(w.message) for w in caught)
