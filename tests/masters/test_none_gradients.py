"""Gradients of None, of params that float and that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from steps import by_update

import optax_mp

START = {"w": jnp.ones((64, 96), jnp.bfloat16), "b": -jnp.zeros(3, jnp.bfloat16)}


@pytest.mark.filterwarnings("ignore::optax_mp.MixedPrecisionWarning")
@pytest.mark.parametrize("form", ["masters", "Split(16)"])
def test_apply_if_finite_inside_takes_gradients_of_none(form):
    """Around masters it cannot: their update of such a param is an array of zeros."""
    settings = {"storage": optax_mp.Split(16)} if form == "Split(16)" else {}
    tx = optax_mp.mixed_precision(optax.apply_if_finite(optax.sgd(1.0), 5), **settings)
    params = START | {"n": jnp.arange(3)}
    ones, state = jnp.ones((64, 96)), tx.init(params)
    no_slope = np.zeros(3, jax.dtypes.float0)
    step = jax.jit(by_update(tx))
    for w, b, n in (ones, None, None), (ones * jnp.nan, None, no_slope):
        after, state = step(params, state, {"w": w, "b": b, "n": n})
        assert as_bits((after["b"], after["n"])) == as_bits((params["b"], params["n"]))
        assert bool((after["w"] != params["w"]).all()) == (w is ones)
        params = after


def test_a_param_frozen_by_none_stays():
    # Not with every rule: optax's adam itself takes no None.
    inner = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1, momentum=0.9))
    tx = optax_mp.mixed_precision(inner)
    params = START
    grads = {"w": jnp.ones((64, 96)), "b": None}
    state = tx.init(params)
    message = r"expected a gradient of \['b'\], got None for the param bfloat16"
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=message):
        after, new_state = by_update(tx)(params, state, grads)
    masters, new_masters = state.master_params, new_state.master_params
    assert as_bits((after["b"], new_masters["b"])) == as_bits(
        (params["b"], masters["b"])
    )
    assert (after["w"] != params["w"]).all()
