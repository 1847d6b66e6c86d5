"""What optax reads and writes in a state with masters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from comparison import as_bits
from optimizers import example_params

import optax_mp


@pytest.mark.parametrize("outside", [True, False])
def test_a_hyperparameter_set_in_the_state_reaches_the_inner_rule(outside):
    def build(learning_rate):
        inner = optax.sgd(learning_rate)
        return optax_mp.mixed_precision(inner) if outside else inner

    tx = optax.inject_hyperparams(build)(learning_rate=0.5)
    tx = tx if outside else optax_mp.mixed_precision(tx)
    params = {"w": jnp.zeros(3, jnp.bfloat16)}
    state = optax.tree.set(tx.init(params), learning_rate=jnp.float32(0.25))
    updates, _ = tx.update({"w": jnp.ones(3)}, state, params)
    np.testing.assert_array_equal(updates["w"], -0.25)


def test_optax_tree_functions_find_their_way():
    tx = optax_mp.mixed_precision(optax.adam(1e-2))
    state = tx.init(example_params("bfloat16"))
    doubled = optax.tree.map_params(tx, lambda x: x * 2, state)
    want = jax.tree.map(lambda x: x * 2, state.master_params)
    assert as_bits(doubled.master_params) == as_bits(want)
    assert int(optax.tree.get(state, "count")) == 0
