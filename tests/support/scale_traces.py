"""Loss scales run over many steps, given as text: "." finite, "x" overflow, and others."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SMALLEST, LARGEST = 2.0**-126, 2.0**126
BAD = np.array([np.nan, np.inf, -np.inf], np.float32)


def run_link(tx, kinds, rng=None):
    """Return the states of a chain link, stacked over the steps of one scan.

    Kinds are those of `LossScaleRule.step`. Only one of "n" and "d" may occur.
    """
    rng = rng or np.random.default_rng(0)
    kinds = np.array(list(kinds))
    bad = BAD[rng.integers(0, len(BAD), len(kinds))]
    grads = np.where((kinds == "x") | (kinds == "n"), bad, np.float32(-2.5))
    # Overflows may be of steps that also lack some micro-batches.
    dropped = np.where(kinds == "x", rng.integers(0, 9, len(kinds)), 3 * (kinds == "d"))
    says = {"dropped_count": dropped}
    if "d" not in kinds:
        says = {"value": np.where(kinds == "n", bad, np.float32(2.5))}

    @jax.jit
    def run(grads, says):
        def step(state, xs):
            grad, says = xs
            state = tx.update({"w": grad}, state, **says)[1]
            return state, state

        return lax.scan(step, tx.init({"w": jnp.float32(0)}), (grads, says))[1]

    return run(grads, says)


def run_values(scale, kinds):
    """Return a loss scale's values, stacked over the steps of one scan."""

    @jax.jit
    def run(scale, finite):
        def step(scale, is_finite):
            scale = scale.adjust(is_finite)
            return scale, (scale.loss_scale, scale.counter)

        return lax.scan(step, scale, finite)[1]

    return run(scale, np.array(list(kinds)) == ".")


def random_kinds(rng, steps, interval, other=""):
    """Return finite runs about `interval` long, and bursts of overflows.

    Args:
        rng: draws them.
        steps: how many.
        interval: the growth interval.
        other: a third kind: some "d" in the place of finite steps, or "n" of overflows.
    """
    out = []
    while len(out) < steps:
        near = interval + rng.integers(-1, 2)
        run = int(rng.choice([rng.integers(0, 4), near, 3 * interval, 8 * interval]))
        burst = int(rng.choice([1, 2, rng.integers(1, 9), rng.integers(1, 120)]))
        out += "." * run + "x" * burst
        if other == "d" and run:
            out[-burst - 1 - rng.integers(run)] = "d"
        elif other == "n":
            out[-rng.integers(1, burst + 1)] = "n"
    return out[:steps]
