"""Forms of several parts of the package, one inside of the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from jax.sharding import Mesh
from promises import (
    by_jax,
    by_value_and_grad,
    check_a_python_float_is_a_param,
    check_a_state_shares_no_buffer,
    check_integer_params_stay,
)
from steps import take_steps

import optax_mp


def sharded(inner):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return optax_mp.zero1(inner, mesh, "data")


hosted = functools.partial(optax_mp.offload, memory_kind=None)
DEVICES = pytest.mark.parametrize("form", [sharded, hosted])


def masters():
    return optax_mp.mixed_precision(optax.adamw(0.1))


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("gradient", [by_value_and_grad, by_jax])
def test_integer_params_stay_in_everybodys_loop(form, gradient):
    check_integer_params_stay(form(masters()), gradient)


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_python_float_is_a_param_as_in_plain_optax(form, is_jitted):
    check_a_python_float_is_a_param(form(masters()), is_jitted)


def test_state_shares_no_buffer_with_params_or_itself():
    params = {"low": jnp.ones(8, jnp.bfloat16), "own": jnp.ones(8)}
    check_a_state_shares_no_buffer(
        lambda inner: hosted(optax_mp.low_bit_state(inner)), params
    )


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
