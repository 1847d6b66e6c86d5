"""What loops do to params and states, on one device, with and without this package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import RULE, tx_of
from recent_flax import recent_nnx
from slow_cases import mostly_slow

import optax_mp

nnx = recent_nnx()
train_state = pytest.importorskip("flax.training.train_state")
in_each_form = mostly_slow("form", ["masters", "5 bytes"], "masters".__eq__)
START = jnp.linspace(-1, 1, 128 * 128).reshape(128, 128).astype(jnp.bfloat16)


def float32_like(tree):
    return jax.tree.map(lambda x: jnp.sin(x.astype(jnp.float32)), tree)


@in_each_form
def test_pretrained_weights_in_a_train_state_stay(form):
    zeros = {"w": jnp.zeros_like(START)}
    state = train_state.TrainState.create(apply_fn=None, params=zeros, tx=tx_of(form))
    state = state.replace(params={"w": START})
    step = jax.jit(lambda s: s.apply_gradients(grads=float32_like(s.params)))
    for _ in range(2):
        state = step(state)
    # Two steps of 2^-6 with momentum; the weights go from -1 to 1.
    np.testing.assert_allclose(state.params["w"], START.astype(np.float32), atol=0.08)


SPLIT = optax_mp.Split(16)
PROMOTED = {
    "float32": (
        optax_mp.mixed_precision(RULE, update_dtype=jnp.float32),
        '.w in a .*got float32.*`equinox.apply_updates`.*`update_dtype="params"`',
    ),
    "Split": (
        optax_mp.mixed_precision(RULE, storage=SPLIT),
        ".w in a .*got float32.*`equinox.apply_updates` promoted it, use `optax.apply_",
    ),
    "stochastic": (
        optax_mp.stochastic_rounding(RULE),
        "nothing to round.*.w is float32.*`equinox.apply_updates`",
    ),
}


@pytest.mark.parametrize("form", PROMOTED)
def test_equinox_apply_updates_promotes_and_the_next_step_says_so(form):
    equinox = pytest.importorskip("equinox")

    class Model(equinox.Module):
        w: jax.Array

    tx, match = PROMOTED[form]

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return equinox.apply_updates(params, updates), state

    params = Model(jnp.ones(3, jnp.bfloat16))
    params, state = step(params, tx.init(params))
    assert params.w.dtype == jnp.float32
    with pytest.raises((ValueError, optax_mp.MixedPrecisionWarning), match=match):
        step(params, state)


def test_updates_as_params_keep_them_under_equinox():
    """As the errors advise."""
    equinox = pytest.importorskip("equinox")
    tx = optax_mp.mixed_precision(RULE, update_dtype="params")
    tx = optax_mp.static_loss_scale(tx, 1.0)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update({"w": jnp.ones(3)}, state, params)
        params = equinox.apply_updates(params, updates)
    assert params["w"].dtype == jnp.bfloat16
