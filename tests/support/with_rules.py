"""Functions with derivative rules, as libraries write them."""

import jax
import jax.numpy as jnp


def forward(x, w):
    """Return tanh(x @ w), and what its derivative needs."""
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def backward(kept, g):
    """Return the gradients of tanh(x @ w)."""
    x, w, y = kept
    slope = g * (1 - y**2)
    return slope @ w.T, x.T @ slope


@jax.custom_vjp
def with_vjp(x, w):
    """Return tanh(x @ w)."""
    return jnp.tanh(x @ w)


with_vjp.defvjp(forward, backward)


@jax.custom_jvp
def with_jvp(x, w):
    """Return tanh(x @ w)."""
    return jnp.tanh(x @ w)


@with_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, (1 - y**2) * (dx @ w + x @ dw)


def gradient(fun):
    """Return the gradient of a sum over `fun(x, w)`, by both."""
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(fun(x, w))), (0, 1))
