"""A step of training: a function of params, state and gradients."""

import jax
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
