"""Loss scales run over many steps, finite or not."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SMALLEST, LARGEST = 2.0**-126, 2.0**126
BAD = np.array([np.nan, np.inf, -np.inf], np.float32)


def run_link(tx, finite, rng=None):
    """Return the states of a chain link, stacked over the steps of one scan."""
    rng = rng or np.random.default_rng(0)
    bad = BAD[rng.integers(0, len(BAD), len(finite))]
    grads = np.where(finite, np.float32(-2.5), bad)

    @jax.jit
    def run(grads):
        def step(state, grad):
            state = tx.update({"w": grad}, state)[1]
            return state, state

        return lax.scan(step, tx.init({"w": jnp.float32(0)}), grads)[1]

    return run(grads)


def run_values(scale, finite):
    """Return a loss scale's values, stacked over the steps of one scan."""

    @jax.jit
    def run(scale, finite):
        def step(scale, is_finite):
            scale = scale.adjust(is_finite)
            return scale, (scale.loss_scale, scale.counter)

        return lax.scan(step, scale, finite)[1]

    return run(scale, finite)


def random_finite(rng, steps, interval):
    """Return which steps are finite: runs about `interval` long, and bursts."""
    out = np.empty(steps, bool)
    at = 0
    while at < steps:
        near = interval + rng.integers(-1, 2)
        run = int(rng.choice([rng.integers(0, 4), near, 3 * interval, 8 * interval]))
        burst = int(rng.choice([1, 2, rng.integers(1, 9), rng.integers(1, 120)]))
        out[at : at + run] = True
        out[at + run : at + run + burst] = False
        at += run + burst
    return out
