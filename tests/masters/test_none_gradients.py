"""Gradients of leaves that are no floating arrays: None, float0, Python numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from promises import (
    OF_ALL_KINDS,
    by_jax,
    by_value_and_grad,
    check_a_python_float_is_a_param,
    check_integer_params_stay,
)
from slow_cases import mostly_slow
from steps import by_update

import optax_mp


def masters(**settings):
    return optax_mp.mixed_precision(optax.adamw(0.1), **settings)


FORMS = {
    "masters": masters,
    "Split(16)": lambda: masters(storage=optax_mp.Split(16)),
    "Split(8)": lambda: masters(storage=optax_mp.Split(8)),
    "loss scale": lambda: optax_mp.dynamic_loss_scale(masters()),
    "link": lambda: optax.chain(optax_mp.dynamic_loss_scale(), masters()),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), masters()),
}


@mostly_slow("form", FORMS, lambda form: form in ("masters", "loss scale"))
@pytest.mark.parametrize("gradient", [by_value_and_grad, by_jax])
def test_integer_params_stay_in_everybodys_loop(form, gradient):
    if form in ("loss scale", "link", "chain") and gradient is by_jax:
        pytest.skip("optax and the loss scale compute with all gradients")
    check_integer_params_stay(FORMS[form](), gradient)


@mostly_slow("form", sorted(FORMS.keys() - {"chain"}), {"loss scale"}.__contains__)
@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_python_float_is_a_param_as_in_plain_optax(form, is_jitted):
    check_a_python_float_is_a_param(FORMS[form](), is_jitted)


@pytest.mark.filterwarnings("ignore::optax_mp.MixedPrecisionWarning")
@pytest.mark.parametrize("form", ["masters", "Split(16)"])
def test_apply_if_finite_inside_takes_gradients_of_none(form):
    """Around masters it cannot: their update of such a param is an array of zeros."""
    settings = {"storage": optax_mp.Split(16)} if form == "Split(16)" else {}
    tx = optax_mp.mixed_precision(optax.apply_if_finite(optax.sgd(1.0), 5), **settings)
    params = {k: OF_ALL_KINDS[k] for k in ("w", "b")} | {"n": jnp.arange(3)}
    ones, state = jnp.ones((64, 96)), tx.init(params)
    no_slope = np.zeros(3, jax.dtypes.float0)
    for w, b, n in (ones, None, None), (ones * jnp.nan, None, no_slope):
        after, state = by_update(tx)(params, state, {"w": w, "b": b, "n": n})
        assert as_bits((after["b"], after["n"])) == as_bits((params["b"], params["n"]))
        assert bool((after["w"] != params["w"]).all()) == (w is ones)
        params = after


def test_a_param_frozen_by_none_stays():
    # Not with every rule: optax's adam itself takes no None.
    inner = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1, momentum=0.9))
    tx = optax_mp.mixed_precision(inner)
    params = {k: OF_ALL_KINDS[k] for k in ("w", "b")}
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
