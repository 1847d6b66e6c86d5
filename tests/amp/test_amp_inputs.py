"""amp on what functions are given, hold and return, and what it keeps of that."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import error
from jax import lax

from optax_mp import amp

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3
STRINGS = np.array(["a", "b"])


def with_rule(w):
    """Return a function with a derivative rule of its own, that holds `w`."""
    fun = jax.custom_vjp(lambda x: jnp.sin(x @ w))
    fun.defvjp(
        lambda x: (jnp.sin(x @ w), x), lambda x, g: ((g * jnp.cos(x @ w)) @ w.T,)
    )
    return fun


def test_a_derivative_rule_may_close_over_arrays():
    def loss(x, wrap):
        return wrap(with_rule(jnp.asarray(W)))(x).sum()

    want = jax.grad(loss)(X, lambda fun: fun)
    assert error(jax.grad(loss)(X, amp), want) < 2e-2


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_derivative_rule_that_closes_over_a_traced_value_is_explained(kind):
    def loss(w, x):
        if kind == "vjp":
            fun = with_rule(x)
        else:
            fun = jax.custom_jvp(lambda w: jnp.sin(x @ w))
            fun.defjvp(lambda p, t: (fun(*p), jnp.cos(x @ p[0]) * (x @ t[0])))
        return jnp.sum(fun(w))

    with pytest.raises(TypeError):
        jax.grad(jax.jit(loss))(W, W)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jax.grad(amp(loss))(W, W)
    notes = " ".join(caught.value.__notes__)
    assert "make them arguments" in notes


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


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x @ w,
        lambda x, w: jax.jit(lambda x: jax.nn.relu(x @ w))(x),
        lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0],
    ],
)
def test_captured_arrays_are_freed(use):
    captured = {}
    fun = amp(lambda x: use(x, captured["w"]))

    def count():
        gc.collect()
        return len(jax.live_arrays())

    fun_of_nothing = amp(lambda x: x)  # so that JAX has begun
    fun_of_nothing(X)
    before = count()
    for step in range(8):
        captured["w"] = jnp.asarray(W + step)
        fun(X)
    captured.clear()
    # What plain JAX keeps for the same calls is a few, not one for each.
    assert count() - before < 6
