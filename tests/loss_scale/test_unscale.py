"""Unscaled gradients, and the first leaf not finite: right, and with few equations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import mostly_slow

from optax_mp.scaling._unscale import ALL_FINITE, unscale

DTYPES = ["float16", "bfloat16", "float32", "complex64"]


@mostly_slow(
    ("dtype", "value"),
    itertools.product(DTYPES, [1.0, np.inf, -np.inf, np.nan]),
    lambda dtype, value: dtype == "float16" or value is np.nan,
)
def test_one_value_among_many_that_is_not_finite_is_found(dtype, value):
    grads = [jnp.ones((3, 5), dtype), jnp.ones(7, dtype).at[4].set(value), jnp.int32(3)]
    for function in (unscale, jax.jit(unscale)):
        unscaled, index = function(grads, jnp.float32(8))
        assert index == (ALL_FINITE if np.isfinite(value) else 1)
        np.testing.assert_array_equal(unscaled[0], np.full((3, 5), 1 / 8))
        assert int(unscaled[2]) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_overflows_when_it_is_divided_is_not_finite(dtype):
    for function in (unscale, jax.jit(unscale)):
        for value, fits in ((1e37, True), (1e38, False)):
            grads = {"w": jnp.array([1, value], dtype)}
            index = function(grads, jnp.float32(2.0**-4))[1]
            assert index == (ALL_FINITE if fits else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_roundings_of_the_quotient_are_no_overflow(dtype):
    """By a scale that is no power of two."""
    grads = jnp.asarray(np.random.default_rng(0).normal(size=1000), dtype)
    for function in (unscale, jax.jit(unscale)):
        assert function(grads, jnp.float32(3.7))[1] == ALL_FINITE


def test_no_gradients_are_finite():
    for tree in ({}, {"n": jnp.int32(1)}, None):
        assert unscale(tree, jnp.float32(2))[1] == ALL_FINITE


def test_the_first_of_several_is_counted_with_gaps():
    bad, good = jnp.array([jnp.nan]), jnp.ones(1)
    grads = [None, good, {"count": jnp.int32(1), "w": good}, bad, good, bad]
    for function in (unscale, jax.jit(unscale)):
        assert function(grads, jnp.float32(2))[1] == 4


@pytest.mark.parametrize(("dtype", "most"), [("float32", 6), ("float16", 4)])
def test_a_leaf_takes_few_equations(dtype, most):
    """So that tracing stays fast; JAX 0.5.3 reshapes each answer to stack it."""

    def count(leaves):
        grads = [jnp.ones((2, 2), dtype)] * leaves
        return len(jax.make_jaxpr(unscale)(grads, jnp.float32(2)).eqns)

    has_stack = "stack" in str(jax.make_jaxpr(jnp.stack)([jnp.float32(1)] * 2))
    assert count(30) - count(20) <= 10 * (most + (not has_stack))
