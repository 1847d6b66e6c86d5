"""LossScaleState, and finding the loss scale in any optimizer state."""

import copy
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from comparison import as_bits
from scaled_losses import LABELS, NO_SCALE, PARAMS, quadratic, scaler, state_with

import optax_mp


@pytest.mark.parametrize("state", [NO_SCALE, (), None, {"a": jnp.int32(2)}])
def test_loss_scale_is_one_without_any(state):
    scale = optax_mp.loss_scale(state)
    assert scale == 1 and scale.dtype == jnp.float32


def test_loss_scale_under_jit_and_vmap():
    state = state_with(8.0)
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)
    assert jax.jit(jax.vmap(optax_mp.loss_scale))(stack).tolist() == [8, 16]


CALLS = {
    "loss_scale": optax_mp.loss_scale,
    "scale_loss": lambda s: optax_mp.scale_loss(jnp.float32(1), s),
    "value_and_grad": lambda s: optax_mp.value_and_grad(quadratic)(s, PARAMS),
    "check_loss_scale": optax_mp.check_loss_scale,
}


def test_two_loss_scales_side_by_side_are_named():
    state = optax.partition({"x": scaler(8.0), "y": scaler(4.0)}, LABELS).init(PARAMS)
    for name, call in CALLS.items():
        expected = (
            rf"^{name}: expected one loss scale in `opt_state`, got 2, at "
            r"opt_state\S*\['x'\]\S* and opt_state\S*\['y'\]\S*; put"
        )
        with pytest.raises(ValueError, match=expected):
            call(state)


def test_a_state_can_be_copied_and_pickled():
    state = state_with(8.0)
    pickled = pickle.loads(pickle.dumps(state))
    for back in (copy.copy(state), copy.deepcopy(state), pickled):
        assert isinstance(back, optax_mp.LossScaleState)
        assert as_bits(back) == as_bits(state)
