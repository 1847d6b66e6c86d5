"""A step of the compact form under JAX's transformations, and with a bad leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import check_alike
from steps import by_update

import optax_mp

SHAPES = {"matrix": (64, 128), "odd": (33, 160), "heads": (2, 2, 32, 130), "row": (70,)}
TX = optax_mp.mixed_precision(
    optax_mp.low_bit_state(optax.adamw(1e-2), min_size=1), storage=optax_mp.Split(8)
)


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16)
        for name, shape in SHAPES.items()
    }


def start():
    params = arrays(0)
    return params, TX.init(params), arrays(1, 0.1)


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
    args = start()
    step = jax.jit(by_update(TX))
    exported = jax.export.export(step, platforms=("cpu", "tpu", "cuda"))(*args)
    check_alike(exported.call(*args), step(*args))
