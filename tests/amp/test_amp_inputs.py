"""amp on what functions are given, hold and return, and what it keeps of that."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import A_FEW_ROUNDINGS, error
from jax import lax

from optax_mp import amp

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3
STRINGS = np.array(["a", "b"])


def test_a_derivative_rule_may_close_over_arrays():
    held = jnp.asarray(W)
    fun = jax.custom_vjp(lambda x: jnp.sin(x @ held))
    fun.defvjp(
        lambda x: (jnp.sin(x @ held), x),
        lambda x, g: ((g * jnp.cos(x @ held)) @ held.T,),
    )
    slopes = jax.jit(lambda x: [jax.grad(f)(x) for f in (lambda x: fun(x).sum(), low)])
    low = amp(lambda x: fun(x).sum())
    want, got = slopes(X)
    assert error(got, want) < A_FEW_ROUNDINGS


class Layer:
    """An object that is no array, though it has a dtype and a shape."""

    dtype, shape = jnp.float32, (8,)

    def __call__(self, x):
        return x @ W


@pytest.mark.parametrize("static", [np.float32, STRINGS, Layer(), "name", None, 3])
def test_leaves_that_are_not_arrays_pass_through(static):
    got, same = amp(lambda x, thing: (x @ W, thing))(X, static)
    assert same is static
    assert got.dtype == jnp.float32


def test_captured_arrays_are_read_at_each_call_and_freed():
    captured = {}

    @amp
    def fun(x):
        w = captured["w"]
        x = jax.jit(lambda x: x @ w)(x)
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=1)[0]

    def count():
        gc.collect()
        return len(jax.live_arrays())

    for step in range(4):
        if step == 1:
            before = count()
        captured["w"] = jnp.asarray(W + step)
        assert error(fun(X), X @ (W + step) @ (W + step)) < A_FEW_ROUNDINGS
    captured.clear()
    assert count() - before < 2
