"""Derivatives through `tx.update`: rounding is the identity, as float32 training says.

Meta-learning differentiates a loss after some steps with respect to what these steps
used: a learning rate, a gradient, the weights at the start.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import mostly_slow

import optax_mp

STEPS = 3
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)
Y = jnp.tanh(X[:, :4])
START = {
    "w": jnp.asarray(RNG.normal(size=(8, 4)) * 0.3, jnp.float32),
    "b": jnp.linspace(-0.5, 0.5, 4),
}
NO_CHANGE = jax.tree.map(jnp.zeros_like, START)
FORMS = {
    "FullCopy": optax_mp.mixed_precision,
    "Split(16)": partial(optax_mp.mixed_precision, storage=optax_mp.Split(16)),
    "Split(8)": partial(optax_mp.mixed_precision, storage=optax_mp.Split(8)),
    "loss scale": lambda inner: optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(inner, storage=optax_mp.Split(16)), init_scale=1.0
    ),
}


def loss(params):
    params = optax_mp.cast_floating(params, jnp.float32)
    return jnp.mean((jnp.tanh(X @ params["w"] + params["b"]) - Y) ** 2)


def loss_after(form, dtype, in_scan, rate, change, start):
    """Return the loss after steps whose first gradient is changed."""
    tx = form(optax.sgd(rate, momentum=0.9))
    params = jax.tree.map(lambda x: x.astype(dtype), start)
    changes = jax.tree.map(lambda x: jnp.stack([x] + [0 * x] * (STEPS - 1)), change)

    def step(carry, change):
        params, state = carry
        grads = optax_mp.cast_floating(jax.grad(loss)(params), jnp.float32)
        grads = jax.tree.map(jnp.add, grads, change)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    if in_scan:
        carry, _ = jax.lax.scan(step, carry, changes)
    else:
        for i in range(STEPS):
            carry, _ = step(carry, jax.tree.map(lambda x, i=i: x[i], changes))
    return loss(carry[0])


def derivatives(form, dtype, in_scan):
    """Return them by rate, first gradient and start, and by rate in forward mode."""
    fun = partial(loss_after, form, dtype, in_scan)
    by_all = jax.jit(jax.grad(fun, (0, 1, 2)))(0.05, NO_CHANGE, START)
    forward = jax.jit(jax.jvp, static_argnums=0)(
        lambda rate: fun(rate, NO_CHANGE, START), (0.05,), (1.0,)
    )
    return *by_all, forward[1]


@pytest.fixture(scope="module")
def in_float32():
    return derivatives(lambda inner: inner, jnp.float32, False)


@mostly_slow(
    ("form", "dtype", "in_scan"),
    [(form, "bfloat16", True) for form in FORMS]
    + [("FullCopy", "float16", True), ("Split(16)", "bfloat16", False)],
    lambda form, dtype, in_scan: form == "Split(16)" and in_scan,
)
def test_derivatives_through_steps_are_those_of_float32(
    form, dtype, in_scan, in_float32
):
    """Over several steps: what a step changes goes on through the param."""
    got = derivatives(FORMS[form], dtype, in_scan)
    for one, want in zip(got, in_float32, strict=True):
        one, want = (
            np.hstack([*map(np.ravel, jax.tree.leaves(x))]) for x in (one, want)
        )
        # Gradients are taken at params that are rounded, by 2^-9 on average.
        assert np.linalg.norm(one - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("bits", [16, 8])
def test_masters_have_the_derivative_of_their_params(bits):
    tx = optax_mp.mixed_precision(optax.sgd(1.0), storage=optax_mp.Split(bits))
    params = {"w": jnp.array([1.0, -3e-6, 0.0], jnp.bfloat16)}
    state = tx.init(params)
    found = jax.jacobian(lambda p: optax_mp.master_params(state, p)["w"])(params)
    np.testing.assert_array_equal(found["w"].astype(jnp.float32), np.eye(3))
