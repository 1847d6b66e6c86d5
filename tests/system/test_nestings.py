"""Forms of several parts of the package, one inside of the other."""

import jax
import jax.numpy as jnp
import optax
from comparison import as_bits
from steps import take_steps

import optax_mp


def test_a_micro_step_around_codes_changes_none():
    """With `MultiSteps` around `low_bit_state`; inside, they are rounded again."""
    low = optax_mp.low_bit_state(optax.sgd(1e-2, 0.9), min_size=1)
    steps = optax.MultiSteps(low, 2, should_skip_update_fn=optax.skip_not_finite)
    tx = optax_mp.mixed_precision(steps, storage=optax_mp.Split(8))
    params, *grads = (
        {"w": jax.random.normal(jax.random.key(i), (64, 128), jnp.bfloat16)}
        for i in range(5)
    )
    params, before = take_steps(tx, params, tx.init(params), grads[:2])
    new, after = take_steps(tx, params, before, grads[2:3])
    _, last = take_steps(tx, new, after, grads[3:])
    codes, kept, moved = (
        as_bits(x.inner_state.inner_opt_state) for x in (before, after, last)
    )
    assert kept == codes != moved
    assert as_bits(new) == as_bits(params)
