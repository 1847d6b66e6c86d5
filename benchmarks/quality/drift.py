"""A small model for 100,000 steps: how far each form goes from float32.

    python benchmarks drift
    python benchmarks drift --json FILE

Sums of four rows of an embedding go through a norm and two layers to the outputs of a
fixed net, by Adam at a constant rate. Tokens are drawn by Zipf's frequencies; eight of
them only in the first thousand steps, so their rows have no gradient for the rest, and
should stand still. `float32, one bit off` starts with one weight off by a unit in the
last place: what it is away is what the problem itself makes of a rounding.
"""

import argparse
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from convergence import SPLIT8, SPLIT16, Form, low_bit, masterless, masters, unchanged

import optax_mp

RATE, STEPS, POINTS = 1e-3, 100_000, 50
TOKENS, UNUSED, USED_FOR, SETTLED = 128, 8, 1000, 4000
WIDTH, HIDDEN, OUTPUTS, BATCH = 128, 64, 8, 32
OFF = "float32, one bit off"
FORMS = (
    Form("float32", unchanged, "float32"),
    Form(OFF, unchanged, "float32"),
    Form("masters", optax_mp.mixed_precision),
    Form("Split(16)", masters(SPLIT16)),
    Form("Split(8)", masters(SPLIT8)),
    Form("compact", masters(SPLIT8, low_bit())),
    Form("compact, no column scales", masters(SPLIT8, low_bit(column_scales=False))),
    Form("stochastic rounding", masterless()),
)
TITLE = "distance to float32, by step"


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Return float32 params, in values that bfloat16 has."""
    shapes = {
        "embedding": (TOKENS, WIDTH),
        "first": (WIDTH, HIDDEN),
        "second": (HIDDEN, OUTPUTS),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(each, shape) * shape[0] ** -0.5
        for (name, shape), each in zip(shapes.items(), keys, strict=True)
    }
    params["norm"] = jnp.ones(WIDTH)
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), params)


def outputs(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Return the net's outputs for sums of these tokens."""
    params = optax_mp.cast_floating(params, jnp.float32)
    x = params["embedding"][tokens].sum(1)
    x *= jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * params["norm"]
    return jax.nn.tanh(x @ params["first"]) @ params["second"]


def draw(key: jax.Array, number: jax.Array) -> jax.Array:
    """Return the tokens of a step."""
    ranks = np.arange(1, TOKENS + 1)
    # The unused are of middling frequency while they are used.
    unused = (ranks > UNUSED) & (ranks <= 2 * UNUSED)
    logits = jnp.where(unused & (number >= USED_FOR), -jnp.inf, -jnp.log(ranks))
    key = jax.random.fold_in(key, number)
    return jax.random.categorical(key, logits, shape=(BATCH, 4))


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the squared distance to the outputs of the fixed net."""
    teacher = init(jax.random.key(7))
    teacher["first"] *= 2.0
    return jnp.mean((outputs(params, tokens) - outputs(teacher, tokens)) ** 2)


def train(form: Form) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """Return the weights, or their masters, and the loss at each point."""
    tx = form.wrap(optax.adam(RATE))
    seen = jax.vmap(partial(draw, jax.random.key(2)))(jnp.arange(STEPS, STEPS + 200))
    seen = seen.reshape(-1, seen.shape[-1])

    def step(number: jax.Array, carry: Any) -> Any:
        params, state = carry
        grads = jax.grad(loss)(params, draw(jax.random.key(1), number))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def steps(carry: Any, first: jax.Array) -> Any:
        return jax.lax.fori_loop(first, first + STEPS // POINTS, step, carry)

    params = init(jax.random.key(0))
    if form.name == OFF:
        first = params["first"]
        params["first"] = first.at[0, 0].set(jnp.nextafter(first[0, 0], jnp.inf))
    params = optax_mp.cast_floating(params, form.param_dtype)
    carry, weights, losses = (params, tx.init(params)), [], []
    for point in range(POINTS):
        carry = steps(carry, point * (STEPS // POINTS))
        now, state = carry
        losses.append(float(jax.jit(loss)(now, seen)))
        kept = hasattr(state, "storage")
        now = optax_mp.master_params(state, now) if kept else now
        weights.append(jax.tree.map(lambda x: np.asarray(x, np.float64), now))
    return weights, losses


def distances(found: Any, float32: Any) -> list[record.Row]:
    """Return how far a form is from float32 at each point."""
    start = jax.tree.map(lambda x: np.asarray(x, np.float64), init(jax.random.key(0)))
    unused = slice(UNUSED, 2 * UNUSED)
    settled = found[SETTLED * POINTS // STEPS - 1]["embedding"][unused]
    rows = []
    for now, reference in zip(found, float32, strict=True):
        way = np.linalg.norm(reference["first"] - start["first"])
        moved = now["embedding"][unused] - settled
        rows.append(
            {
                "matrix": float(
                    np.linalg.norm(now["first"] - reference["first"]) / way
                ),
                "norm": float(np.mean(now["norm"] - reference["norm"]) / RATE),
                "unused rows": float(np.abs(moved).max() / RATE),
                "unused rows, mean": float(moved.mean() / RATE),
            }
        )
    return rows


def main() -> None:
    """Train in all forms, and print how far each goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    record.add_option(parser)
    args = parser.parse_args()
    lines, float32 = [], None
    for form in FORMS:
        began = time.perf_counter()
        found, losses = train(form)
        float32 = float32 or found
        rows = distances(found, float32)
        print(f"{form.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        last = {f"{name}, at the end": x for name, x in rows[-1].items()}
        curve = {name: [row[name] for row in rows] for name in rows[0]}
        mean = float(np.mean(losses[-10:]))
        line = {"form": form.name, "loss, mean of the last fifth": mean} | last
        lines.append(line | {"curve": curve | {"loss": losses}})
        record.finish(args.json, {TITLE: lines}, record.machine_of(jax.devices()))
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(lines)}")


if __name__ == "__main__":
    main()
