"""Leaves that fp8 layers overwrite with their gradient: refused, and Flax's way out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits

import optax_mp

NAME = "_overwrite_with_gradient"


def tree(value):
    return {
        "params": {"w": jnp.full(2, value)},
        NAME: {"dense": {"scale": jnp.ones(1)}},
    }


def updated(make):
    def call(grads):
        tx = make()
        return tx.update(grads, tx.init(grads), grads)

    return call


SGD = optax.sgd(0.1)
CALLS = {
    "dynamic_loss_scale": updated(lambda: optax_mp.dynamic_loss_scale(SGD)),
    "static_loss_scale": updated(lambda: optax_mp.static_loss_scale()),
    "StaticLossScale.unscale": optax_mp.StaticLossScale(8.0).unscale,
    "DynamicLossScale.unscale": lambda grads: optax_mp.dynamic_scale_grad(
        lambda p: p["params"]["w"].sum() * p[NAME]["dense"]["scale"].sum()
    )(grads, loss_scale=optax_mp.DynamicLossScale(8.0)),
}


@pytest.mark.parametrize("caller", CALLS)
def test_an_overwritten_leaf_is_refused_with_its_path_and_the_way_out(caller):
    expected = (
        rf"^{caller}: expected weights and their gradients, got an fp8 scale at "
        rf"\['{NAME}'\]\['dense'\]\['scale'\], .*TrainState"
    )
    with pytest.raises(ValueError, match=expected):
        CALLS[caller](tree(1.0))


def test_overwritten_leaves_that_a_mask_hides_pass():
    tx = optax.masked(
        optax_mp.static_loss_scale(SGD, 8.0), {"params": True, NAME: False}
    )
    params = tree(1.0)
    grads = tree(8.0)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert as_bits(updates[NAME]) == as_bits(grads[NAME])
    np.testing.assert_array_equal(updates["params"]["w"], np.float32(-0.1))


def test_an_fp8_layer_trains_in_the_train_state_of_flax():
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    dot_general = nn.fp8_ops.Fp8DotGeneral
    model = nn.Dense(4, dtype=jnp.bfloat16, dot_general_cls=dot_general)
    x = jax.random.normal(jax.random.key(0), (16, 8), jnp.bfloat16)
    target = 0.5 * x[:, :4]
    masters = optax_mp.mixed_precision(optax.adam(0.03))
    variables = model.init(jax.random.key(1), x)
    variables["params"] = optax_mp.cast_floating(variables["params"], jnp.bfloat16)
    start = train_state.TrainState.create(
        apply_fn=model.apply,
        params=variables,
        tx=optax_mp.dynamic_loss_scale(masters, init_scale=2.0**10),
    )

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - target).astype(jnp.float32) ** 2)

    @jax.jit
    def step(state, x):
        value, grads = optax_mp.value_and_grad(loss)(state.opt_state, state.params, x)
        return state.apply_gradients(grads=grads), value, grads

    state, losses = start, []
    for _ in range(40):
        state, value, grads = step(state, x)
        losses.append(float(value))
        # As the layer returned them: not divided by the loss scale.
        assert as_bits(state.params[NAME]) == as_bits(grads[NAME])
    assert losses[-1] < 0.1 * losses[0]
    scales = jax.tree.leaves(state.params[NAME])
    assert all(np.isfinite(leaf).all() for leaf in scales)
    assert as_bits(state.params[NAME]) != as_bits(start.params[NAME])
    assert state.opt_state.total_skipped_count == 0
    # Masters and moments are of the weights alone.
    assert optax_mp.master_params(state.opt_state, state.params["params"]).keys() == {
        "kernel",
        "bias",
    }

    # A skipped step keeps the weights; Flax overwrites the scales all the same.
    after, _, grads = step(state, x.at[0, 0].set(jnp.nan))
    assert after.opt_state.total_skipped_count == 1
    assert as_bits(after.params["params"]) == as_bits(state.params["params"])
    assert as_bits(after.params[NAME]) == as_bits(grads[NAME])
