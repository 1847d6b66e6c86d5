"""A step of training, in each of the two ways: functions of params, state, gradients."""

import jax
import optax

import optax_mp


def by_update(tx):
    """Return the step that every optimizer of optax has."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def by_take_step(tx, **settings):
    """Return the step of `take_step`."""

    def step(params, state, grads):
        return optax_mp.take_step(tx, grads, state, params, **settings)

    return step


def take_steps(tx, params, state, gradients):
    """Take a jitted step for each tree of gradients."""
    step = jax.jit(by_update(tx))
    for grads in gradients:
        params, state = step(params, state, grads)
    return params, state
