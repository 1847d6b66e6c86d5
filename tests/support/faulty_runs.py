"""Optimizers and loss scales that the runs with faults share."""

import functools

import faults
import jax.numpy as jnp
import optax

import optax_mp

CHUNK = 1000
SPLIT = optax_mp.Split(bits=16)

dynamic = functools.partial(
    optax_mp.dynamic_loss_scale, init_scale=2.0**10, **faults.LIVELY
)


def momentum():
    limit = float(faults.LIMIT)
    return optax.chain(
        optax.clip(limit),
        optax.trace(0.5),
        optax.add_decayed_weights(0.25),
        optax.scale(-(2.0**-4)),
    )


def adamw():
    limit = float(faults.LIMIT)
    rule = optax.adamw(2.0**-4, b1=0.5, b2=0.5, eps=2.0**-20, weight_decay=2.0**-4)
    return optax.chain(optax.clip(limit), rule)


def around(scaling, inner, **settings):
    return scaling(optax_mp.mixed_precision(inner, **settings))


def start_late(state):
    """Return the state with the count at which the reference starts AdamW."""
    if not optax.tree.get_all_with_path(state, "mu"):
        return state
    return optax.tree.set(state, count=jnp.asarray(faults.AdamW.START))
