"""A step of the compact form under JAX's transformations, and with a bad leaf."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, check_alike
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


def test_each_member_of_a_vmap_takes_its_own_step():
    args = start()
    both = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), args)
    got = jax.jit(jax.vmap(by_update(TX)))(*both)
    want = jax.jit(by_update(TX))(*args)
    # But for the last place of a few numbers, as XLA fuses a batch otherwise.
    check_alike(jax.tree.map(operator.itemgetter(1), got), want, 1e-3)


def test_a_scan_takes_the_steps_of_a_loop():
    params, state, grads = start()

    def scanned(carry, grads):
        return by_update(TX)(*carry, grads), None

    twice = jax.tree.map(lambda x: jnp.stack([x, -x]), grads)
    got, _ = jax.jit(lambda *carry: jax.lax.scan(scanned, carry, twice))(params, state)
    step = jax.jit(by_update(TX))
    want = step(*step(params, state, grads), jax.tree.map(jnp.negative, grads))
    assert as_bits(got) == as_bits(want)


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


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_number_that_is_not_finite_stays_in_its_leaf(value):
    params, state, grads = start()
    step = jax.jit(by_update(TX))
    want, _ = step(params, state, grads)
    got, _ = step(params, state, grads | {"odd": jnp.full_like(grads["odd"], value)})
    for name in SHAPES.keys() - {"odd"}:
        assert as_bits(got[name]) == as_bits(want[name])


def test_a_step_is_exported_for_several_platforms():
    args = start()
    step = jax.jit(by_update(TX))
    exported = jax.export.export(step, platforms=("cpu", "tpu", "cuda"))(*args)
    check_alike(exported.call(*args), step(*args))
