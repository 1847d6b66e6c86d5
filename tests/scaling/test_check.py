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


@pytest.mark.parametrize("state", [NO_SCALE, ()])
def test_check_without_a_loss_scale_passes(state):
    """So that a loop need not know in which precision it runs."""
    optax_mp.check_loss_scale(state, max_skipped=0, params=PARAMS)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_check_sees_the_skips_of(nesting):
    state, grads = skipped(2, NESTINGS[nesting]())
    optax_mp.check_loss_scale(state, max_skipped=2)
    with pytest.raises(FloatingPointError, match=r"2 steps .* is 1024\. .*\['a'\]"):
        optax_mp.check_loss_scale(state, max_skipped=1, grads=grads)


# Which leaf, and why


def error_of(state, **settings):
    with pytest.raises(FloatingPointError) as caught:
        optax_mp.check_loss_scale(state, max_skipped=0, **settings)
    return str(caught.value)


def after(tx, params, grads, steps=1):
    state = tx.init(params)
    for _ in range(steps):
        state = jax.jit(tx.update)(grads, state, params)[1]
    return state


GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])
MIXED = {"a": GOOD, "frozen": jnp.int32(1), "n": None, "x": {"y": GOOD, "z": GOOD}}
FORMS = {
    "float32": lambda: optax.sgd(0.1),
    "Split(16)": lambda: optax_mp.mixed_precision(
        optax.sgd(0.1), storage=optax_mp.Split()
    ),
}


@mostly_slow("form", FORMS, lambda form: form == "Split(16)")
def test_the_first_leaf_is_named_that_was_not_finite_in_the_last_skipped_step(form):
    params = optax_mp.cast_floating(MIXED, "bfloat16") if form != "float32" else MIXED
    tx = optax_mp.dynamic_loss_scale(FORMS[form]())
    state, names = tx.init(params), []
    assert state.nonfinite_index == -1
    for bad in ("z", None, "y", None):
        x = {name: BAD if name == bad else GOOD for name in "yz"}
        # No gradient for what is not floating, as `value_and_grad` has it.
        grads = {"a": GOOD, "frozen": None, "n": None, "x": x}
        state = jax.jit(tx.update)(grads, state, params)[1]
        names.append(error_of(state._replace(skipped_count=1), params=params))
    found = [name.split("not finite was ")[1] for name in names]
    assert found == ["['x']['z'].", "['x']['z'].", "['x']['y'].", "['x']['y']."]


CAUSES = {
    "an overflow, perhaps": (optax_mp.dynamic_loss_scale, {}, 3, "raise `max_skipped`"),
    "the model": (optax_mp.dynamic_loss_scale, {}, 16, "down to 1. A scale of at most"),
    "a static scale": (
        optax_mp.static_loss_scale,
        {"scale": 8.0},
        9,
        "If a lower scale ends this",
    ),
}


@mostly_slow("cause", CAUSES, lambda cause: cause in ("the model", "a static scale"))
def test_the_scale_tells_an_overflow_from_a_nan_of_the_model(cause):
    scaled, settings, steps, expected = CAUSES[cause]
    error = error_of(after(scaled(optax.sgd(0.1), **settings), GOOD, BAD, steps))
    assert expected in error
    assert ("so this is a NaN" in error) == (cause == "the model")
