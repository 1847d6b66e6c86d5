"""A step of training: a function of params, state and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def by_update(tx):
    """Return the step that every optimizer of optax has."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def take_steps(tx, params, state, gradients):
    """Take a jitted step for each tree of gradients."""
    step = jax.jit(by_update(tx))
    for grads in gradients:
        params, state = step(params, state, grads)
    return params, state


def take_rounded_steps(tx):
    """Return (params, state) after steps with 16-bit gradients, of 65,536 weights.

    Their updates are rounded, so that some masters do not round to their params.
    """
    rng = np.random.default_rng(0)
    params, *grads = (
        {"w": jnp.asarray(rng.normal(size=65536), jnp.bfloat16)} for _ in range(4)
    )
    return take_steps(tx, params, tx.init(params), grads)
