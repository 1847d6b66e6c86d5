"""Moving averages of weights that jump by 10%: in 16 bits, and by `with_average`.

    python benchmarks average
    python benchmarks average --json FILE

The weights jump once and stay, and the average follows for three times 1 / (1 - decay)
steps: 95% of the way. Then weights that walk at random, for the error of moves that are
taken every few steps, as a share of the average's distance from the weights.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

DECAYS = (0.9, 0.99, 0.999, 0.9999)
SHARES = (0.002, 0.01, 0.02, 0.05, 0.1)
SIZE = 4096


def way(decay: float, dtype: str, *, ours: bool) -> float:
    """Return how much of its way an average has gone."""
    start = 0.02 * jax.random.normal(jax.random.key(0), (SIZE,))
    old, new = start.astype(dtype), (1.1 * start).astype(dtype)
    tx = optax_mp.with_average(optax.set_to_zero(), decay)

    def step(carry, _):
        average, state = carry
        if ours:
            _, state = tx.update(new, state, new)
            return (state.average, state), None
        return (optax.incremental_update(new, average, 1 - decay), state), None

    carry = tx.init(old).average if ours else old, tx.init(old)
    steps = round(3 / (1 - decay))
    (average, _), _ = jax.lax.scan(step, carry, length=steps)
    gone, whole = (x.astype(jnp.float32) - old for x in (average, new))
    return float(jnp.vdot(gone, whole) / jnp.vdot(whole, whole))


def error(decay: float, every: int) -> float:
    """Return how far an average is off, as a share of its distance."""
    forms = [optax_mp.with_average(optax.sgd(1.0), decay, every=k) for k in (1, every)]
    weights = jax.random.normal(jax.random.key(0), (SIZE,))
    steps = 4 * round(1 / (1 - decay))

    def step(carry, key):
        weights, states = carry
        drift = 1e-3 * (0.1 + jax.random.normal(key, (SIZE,)))
        moved = [
            tx.update(drift, x, weights) for tx, x in zip(forms, states, strict=True)
        ]
        weights = optax.apply_updates(weights, moved[0][0])
        return (weights, [state for _, state in moved]), None

    carry = weights, [tx.init(weights) for tx in forms]
    keys = jax.random.split(jax.random.key(1), steps // every * every)
    (weights, states), _ = jax.lax.scan(step, carry, keys)
    exact, lazy = (state.average for state in states)
    return float(jnp.linalg.norm(lazy - exact) / jnp.linalg.norm(weights - exact))


def main() -> None:
    """Read the options and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    record.add_option(parser)
    path = parser.parse_args().json
    ways, errors = [], []
    for decay in DECAYS:
        row = {x: way(decay, x, ours=False) for x in ("float32", "bfloat16", "float16")}
        ours = {"with_average, bfloat16": way(decay, "bfloat16", ours=True)}
        ways.append({"decay": str(decay)} | row | ours)
    for share in SHARES:
        every = round(share / 0.001)
        row = {"every * (1 - decay)": str(share), "every": every}
        errors.append(row | {"off by": error(0.999, every)})
    tables = {"share of the way": ways, "moves every few steps, decay 0.999": errors}
    shown = [record.heading(jax.devices()), *map(record.as_markdown, tables.values())]
    print("\n\n".join(shown))
    record.finish(path, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
