"""One bfloat16 weight under a thousand small updates, with a master and without.

    python benchmarks stall
    python benchmarks stall --json FILE  # with the values on the way

The weight starts at 1.0 and its gradient is 1 at every step, so SGD takes the learning
rate off it each time: less than half of the distance between two bfloat16 values there.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

STEPS, LEARNING_RATE = 1000, 1e-3


def curve(tx: optax.GradientTransformation, dtype: str) -> jax.Array:
    """Return the weight before the first step and after each."""
    weight = jnp.ones((), dtype)

    def step(carry, _):
        weight, state = carry
        updates, state = tx.update(jnp.ones_like(weight), state, weight)
        weight = optax.apply_updates(weight, updates)
        return (weight, state), weight

    _, weights = jax.lax.scan(step, (weight, tx.init(weight)), length=STEPS)
    return jnp.concatenate([weight[None], weights]).astype(jnp.float32)


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    record.add_option(parser)
    path = parser.parse_args().json
    sgd = optax.sgd(LEARNING_RATE)
    steps = list(range(0, STEPS + 1, 10))
    rows = []
    for name, tx, dtype in (
        ("plain optax, float32", sgd, "float32"),
        ("plain optax, bfloat16", sgd, "bfloat16"),
        ("mixed_precision, bfloat16", optax_mp.mixed_precision(sgd), "bfloat16"),
    ):
        weights = curve(tx, dtype)[::10].tolist()
        row = {"optimizer": name, "weight at the end": weights[-1]}
        rows.append(row | {"curve": [steps, weights]})
    tables = {f"after {STEPS} updates of -{LEARNING_RATE}": rows}
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    record.finish(path, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
