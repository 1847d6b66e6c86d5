"""Gradients of leaves that are no floating arrays: None, float0, Python numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from jax.sharding import Mesh
from slow_cases import mostly_slow
from steps import by_update

import optax_mp

PARAMS = {
    "w": jnp.ones((64, 96), jnp.bfloat16),
    "b": -jnp.zeros(3, jnp.bfloat16),
    "steps": jnp.arange(3),
    "mask": jnp.array([True, False]),
    "absent": None,
}


def loss(params, x):
    return jnp.sum((x @ params["w"] + params["b"].sum()) * params["mask"][0])


def masters(**settings):
    return optax_mp.mixed_precision(optax.adamw(0.1), **settings)


def sharded():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return optax_mp.zero1(masters(), mesh, "data")


FORMS = {
    "masters": masters,
    "Split": lambda: masters(storage=optax_mp.Split(16)),
    "stochastic_rounding": lambda: optax_mp.stochastic_rounding(optax.adamw(0.1)),
    "loss scale": lambda: optax_mp.dynamic_loss_scale(masters()),
    "link": lambda: optax.chain(optax_mp.dynamic_loss_scale(), masters()),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), masters()),
    "zero1": sharded,
    "offload": lambda: optax_mp.offload(masters(), memory_kind=None),
    "low_bit_state": lambda: masters(storage=optax_mp.Split(8)),
}


def by_value_and_grad(state, params, x):
    return optax_mp.value_and_grad(loss)(state, params, x)[1]


def by_jax(state, params, x):
    del state
    return jax.grad(loss, allow_int=True)(params, x)


@mostly_slow("form", FORMS, lambda form: form in ("masters", "loss scale"))
@pytest.mark.parametrize("gradient", [by_value_and_grad, by_jax])
def test_integer_params_stay_in_everybodys_loop(form, gradient):
    if form in ("loss scale", "link", "chain") and gradient is by_jax:
        pytest.skip("optax and the loss scale compute with all gradients")
    tx = FORMS[form]()
    state = tx.init(PARAMS)

    @jax.jit
    def step(state, params, x):
        return by_update(tx)(params, state, gradient(state, params, x))

    params, after = step(state, PARAMS, jnp.ones((2, 64), jnp.bfloat16))
    assert avals((params, after)) == avals((PARAMS, state))
    kept = ("steps", "mask", "absent")
    assert as_bits([params[k] for k in kept]) == as_bits([PARAMS[k] for k in kept])
    assert (params["w"] != PARAMS["w"]).all()


@mostly_slow("form", sorted(FORMS.keys() - {"chain"}), {"loss scale"}.__contains__)
@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_python_float_is_a_param_as_in_plain_optax(form, is_jitted):
    def train(tx, dtype):
        params = {"t": 1.5, "w": jnp.ones(2, dtype)}
        state = tx.init(params)
        kinds = avals(state)
        step = jax.jit(by_update(tx)) if is_jitted else by_update(tx)
        gradient = optax_mp.value_and_grad(lambda p: p["t"] ** 2 + 0 * p["w"].sum())
        for _ in range(3):
            params, state = step(params, state, gradient(state, params)[1])
        return params["t"], avals(state) == kinds

    want, _ = train(optax.adamw(0.1), jnp.float32)
    got, is_stable = train(FORMS[form](), jnp.bfloat16)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert is_stable  # optax's own moments start with weak types
    np.testing.assert_allclose(want, 1.2, atol=0.01)


def test_a_param_frozen_by_none_stays():
    # Not with every rule: optax's adam itself takes no None.
    inner = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1, momentum=0.9))
    tx = optax_mp.mixed_precision(inner)
    params = {k: PARAMS[k] for k in ("w", "b")}
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
