"""LossScaleState, and finding the loss scale in any optimizer state."""

import copy
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from comparison import as_bits
from scaled_losses import (
    LABELS,
    NESTINGS,
    NO_SCALE,
    PARAMS,
    quadratic,
    scaler,
    state_with,
)

import optax_mp


@pytest.mark.parametrize("nesting", NESTINGS)
def test_loss_scale_is_found_in(nesting):
    state = NESTINGS[nesting]().init(PARAMS)
    scale = optax_mp.loss_scale(state)
    assert scale == 1024
    assert (scale.dtype, scale.shape) == (jnp.float32, ())


@pytest.mark.parametrize("state", [NO_SCALE, (), None, {"a": jnp.int32(2)}])
def test_loss_scale_is_one_without_any(state):
    scale = optax_mp.loss_scale(state)
    assert scale == 1
    assert scale.dtype == jnp.float32


def test_loss_scale_under_jit_and_vmap():
    state = state_with(8.0)
    assert jax.jit(optax_mp.loss_scale)(state) == 8
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)
    assert jax.vmap(optax_mp.loss_scale)(stack).tolist() == [8, 16]


CALLS = {
    "loss_scale": optax_mp.loss_scale,
    "scale_loss": lambda s: optax_mp.scale_loss(jnp.float32(1), s),
    "value_and_grad": lambda s: optax_mp.value_and_grad(quadratic)(s, PARAMS),
    "check_loss_scale": optax_mp.check_loss_scale,
}


@pytest.mark.parametrize("call", CALLS)
def test_two_loss_scales_side_by_side_are_named(call):
    tx = optax.partition({"x": scaler(8.0), "y": scaler(4.0)}, LABELS)
    expected = (
        rf"^{call}: expected one loss scale in `opt_state`, .*, got 2, at "
        r"opt_state\S*\['x'\]\S* and opt_state\S*\['y'\]\S*; put"
    )
    with pytest.raises(ValueError, match=expected):
        CALLS[call](tx.init(PARAMS))


# The state


@pytest.mark.parametrize("trip", [copy.copy, copy.deepcopy, pickle])
def test_a_state_can_be_copied_and_pickled(trip):
    state = state_with(8.0)
    back = pickle.loads(pickle.dumps(state)) if trip is pickle else trip(state)
    assert isinstance(back, optax_mp.LossScaleState)
    assert as_bits(back) == as_bits(state)
