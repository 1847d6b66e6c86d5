"""Loss scales run over many steps, given as text: "." finite, "x" overflow, and others."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SMALLEST, LARGEST = 2.0**-126, 2.0**126
BAD = np.array([np.nan, np.inf, -np.inf], np.float32)


def run_link(tx, kinds, rng=None):
    """Return the states of a chain link, stacked over the steps of one scan.

    Kinds are those of `LossScaleRule.step`.
    """
    rng = rng or np.random.default_rng(0)
    kinds = np.array(list(kinds))
    bad = BAD[rng.integers(0, len(BAD), len(kinds))]
    grads = np.where((kinds == "x") | (kinds == "n"), bad, np.float32(-2.5))
    losses = np.where(kinds == "n", bad, np.float32(2.5))

    @jax.jit
    def run(grads, losses):
        def step(state, xs):
            grad, loss = xs
            state = tx.update({"w": grad}, state, value=loss)[1]
            return state, state

        return lax.scan(step, tx.init({"w": jnp.float32(0)}), (grads, losses))[1]

    return run(grads, losses)


def run_values(scale, kinds):
    """Return a loss scale's values, stacked over the steps of one scan."""

    @jax.jit
    def run(scale, finite):
        def step(scale, is_finite):
            scale = scale.adjust(is_finite)
            return scale, (scale.loss_scale, scale.counter)

        return lax.scan(step, scale, finite)[1]

    return run(scale, np.array(list(kinds)) == ".")


def random_kinds(rng, steps, interval, has_bad_losses=False):
    """Return finite runs about `interval` long, and bursts of overflows.

    Args:
        rng: draws them.
        steps: how many.
        interval: the growth interval.
        has_bad_losses: whether some "n" are in the place of overflows.
    """
    out = []
    while len(out) < steps:
        near = interval + rng.integers(-1, 2)
        run = int(rng.choice([rng.integers(0, 4), near, 3 * interval, 8 * interval]))
        burst = int(rng.choice([1, 2, rng.integers(1, 9), rng.integers(1, 120)]))
        out += "." * run + "x" * burst
        if has_bad_losses:
            out[-rng.integers(1, burst + 1)] = "n"
    return out[:steps]
