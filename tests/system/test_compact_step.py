"""A step of the compact form under derivatives, and for several platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import check_alike
from steps import by_update

import optax_mp

TX = optax_mp.mixed_precision(
    optax_mp.low_bit_state(optax.adamw(1e-2), min_size=1), storage=optax_mp.Split(8)
)


def test_a_slope_that_is_known_to_be_zero_stays_so():
    """That of a second moment of 0 is: else its square root makes NaN of it."""
    params = {"w": jnp.ones((64, 128))}
    grads = {"w": jnp.ones((64, 128)).at[0].set(0)}
    state = optax_mp.low_bit_state(optax.adam(0.1), min_size=1).init(params)

    def loss(rate):
        low = optax_mp.low_bit_state(optax.adam(rate), min_size=1)
        moved, after = by_update(low)(params, state, grads)
        return jnp.sum(by_update(low)(moved, after, grads)[0]["w"] ** 2)

    assert np.isfinite(jax.jacfwd(jax.jit(loss))(0.1))


def test_a_step_is_exported_for_several_platforms():
    rng, step = np.random.default_rng(0), jax.jit(by_update(TX))
    params, grads = (jnp.asarray(rng.normal(size=(33, 160)), "bfloat16") for _ in "pg")
    args = params, TX.init(params), grads
    exported = jax.export.export(step, platforms=("cpu", "tpu", "cuda"))(*args)
    check_alike(exported.call(*args), step(*args))
