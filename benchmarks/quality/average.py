"""Moving averages of weights: in 16 bits, and by `with_average`.

    python benchmarks average
    python benchmarks average --json FILE

Weights jump by 10% and stay, and the average follows for three times 1 / (1 - decay)
steps: 95% of the way.

Then a model that denoises scikit-learn's digits, with the objective of Flax's example
"Train a diffusion model for image generation": of an image and noise, mixed in a share
that is a sigmoid of a normal number, it says their difference. An MLP stands for the
U-Net. Its average is evaluated on images that it did not see.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from finetune import interval
from optimizer_forms import adamw, compact, masters
from sklearn.datasets import load_digits

import optax_mp

DECAYS = (0.9, 0.99, 0.999, 0.9999)
SIZE = 4096
SEEDS, STEPS, DECAY, HIDDEN = 5, 2000, 0.995, 128


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


def denoise(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
    """Return the squared error of what an MLP says of images that noise is added to."""
    keys = jax.random.split(key, 2)
    share = jax.nn.sigmoid(jax.random.normal(keys[0], (len(images), 1)))
    noise = jax.random.normal(keys[1], images.shape)
    mixed = (1 - share) * noise + share * images
    waves = jnp.sin(share * 2.0 ** jnp.arange(8))
    x = jnp.concatenate([mixed, waves], axis=1).astype(params[0].dtype)
    for weights in params[:-1]:
        x = jax.nn.gelu(x @ weights)
    said = (x @ params[-1]).astype(jnp.float32)
    return jnp.square(said - (images - noise)).mean()


def denoisers(
    dtype: str, wrap: Callable[[Any], Any], average_dtype: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the held-out losses of the weights and of their average, by seed.

    The average is by `with_average`, or by `optax.incremental_update` in a dtype.
    """
    images = jnp.asarray(load_digits().data, jnp.float32) / 8 - 1
    seen, unseen = images[:1500], images[1500:]
    tx, with_ours = wrap(adamw()), average_dtype is None
    if with_ours:
        tx = optax_mp.with_average(tx, DECAY)

    def run(seed: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = (72, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 64)
        drawn = zip(jax.random.split(keys[0], 3), shapes, strict=True)
        params = [jax.random.normal(k, x) * x[0] ** -0.5 for k, x in drawn]
        params = optax_mp.cast_floating(params, dtype)

        def step(carry: Any, number: jax.Array) -> Any:
            params, state, average = carry
            now = jax.random.split(jax.random.fold_in(keys[1], number), 2)
            batch = seen[jax.random.randint(now[0], (64,), 0, len(seen))]
            grads = jax.grad(denoise)(params, batch, now[1])
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            if not with_ours:
                low = optax_mp.cast_floating(params, average_dtype)
                average = optax.incremental_update(low, average, 1 - DECAY)
            return (params, state, average), None

        average = optax_mp.cast_floating(params, average_dtype or "float32")
        carry = params, tx.init(params), average
        (params, state, average), _ = jax.lax.scan(step, carry, jnp.arange(STEPS))
        if with_ours:
            average = optax_mp.average_params(state, params)
        return [
            denoise(optax_mp.cast_floating(x, "float32"), unseen, keys[2])
            for x in (params, average)
        ]

    ends = jax.jit(lambda seeds: jax.lax.map(run, seeds))(jnp.arange(SEEDS))
    return np.asarray(ends[0]), np.asarray(ends[1])


# How each wraps AdamW, the dtype of its params, and how it averages them.
DENOISERS: dict[str, tuple[str, Callable[[Any], Any], str | None]] = {
    "float32, `optax.incremental_update`": ("float32", lambda tx: tx, "float32"),
    "float32, `with_average`": ("float32", lambda tx: tx, None),
    "masters, `with_average`": ("bfloat16", masters, None),
    "compact, `with_average`": ("bfloat16", compact, None),
    "masters, bfloat16 average": ("bfloat16", masters, "bfloat16"),
}


def denoised() -> list[record.Row]:
    """Return the losses of each form, and its average's beside float32's."""
    rows, first = [], np.empty(0)
    for name, form in DENOISERS.items():
        plain, averaged = denoisers(*form)
        row = {"denoiser": name, "of the weights": f"{plain.mean():.4f}"}
        row |= {"of the average": f"{averaged.mean():.4f}"}
        if rows:
            row |= {"above": interval(averaged - first)}
            row |= {"in its spread": record.place_in(first, averaged)}
        else:
            first = averaged
        rows.append(row | {"losses": averaged.tolist()})
    return rows


def main() -> None:
    """Read the options and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    record.add_option(parser)
    path = parser.parse_args().json
    ways = []
    for decay in DECAYS:
        row = {x: way(decay, x, ours=False) for x in ("float32", "bfloat16", "float16")}
        ours = {"with_average, bfloat16": way(decay, "bfloat16", ours=True)}
        ways.append({"decay": str(decay)} | row | ours)
    tables = {"share of the way": ways}
    title = f"held-out losses of denoisers, {STEPS} steps, {SEEDS} seeds, decay {DECAY}"
    tables[title] = denoised()
    shown = [record.heading(jax.devices()), *map(record.as_markdown, tables.values())]
    print("\n\n".join(shown))
    record.finish(path, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
