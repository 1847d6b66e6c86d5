"""Final held-out losses of every form of AdamW, against float32 over several seeds.

    python benchmarks convergence              # all tasks, Markdown tables
    python benchmarks convergence --json FILE  # also the tables as data

A form says in what dtype the params are, and how masters and moments are kept. Three
models are trained in each: the demo's transformer on the demo's novel, a small conv
net on scikit-learn's digits, and an MLP on Friedman's function with noise. A seed
sets initialisation and batches, the same for all forms. Gradients are taken at the
params as they are, so in bfloat16 in all forms but float32; so is the held-out
loss.

The models being small, `low_bit_state` is told to quantise arrays from 256 elements on
instead of 4096, so that all matrices but the tiniest are, and no norms and biases.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from sklearn.datasets import load_digits, make_friedman1
from the_demo import (
    Settings,
    drawer,
    init_params,
    make_adamw,
    make_loss,
    read_corpus,
)

import optax_mp

DEFAULTS = Settings()
MIN_SIZE = 256

Batch = Any
Wrapper = Callable[[optax.GradientTransformation], optax.GradientTransformation]


@dataclass(frozen=True)
class Form:
    """One way to keep params, masters and moments.

    Attributes:
        name: the row's name.
        wrap: makes the form's optimizer from the AdamW that all forms share.
        param_dtype: the dtype of the params.
    """

    name: str
    wrap: Wrapper
    param_dtype: str = "bfloat16"


def unchanged(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner`: plain optax."""
    return inner


def low_bit(**settings: Any) -> Wrapper:
    """Return `low_bit_state` with these settings, for small models."""
    return lambda inner: optax_mp.low_bit_state(inner, min_size=MIN_SIZE, **settings)


def masters(storage: Any, within: Wrapper = unchanged) -> Wrapper:
    """Return `mixed_precision` around `within`."""
    return lambda inner: optax_mp.mixed_precision(within(inner), storage=storage)


def masterless(within: Wrapper = unchanged) -> Wrapper:
    """Return `stochastic_rounding` around `within`."""
    return lambda inner: optax_mp.stochastic_rounding(within(inner))


FULL, SPLIT16, SPLIT8 = optax_mp.FullCopy(), optax_mp.Split(16), optax_mp.Split(8)
# The first is what the others are compared with.
FORMS = (
    Form("float32", unchanged, "float32"),
    Form("bf16, naive", unchanged),
    Form("bf16, FullCopy", masters(FULL)),
    Form("bf16, Split(16)", masters(SPLIT16)),
    Form("bf16, Split(16), 16-bit moments", masters(SPLIT16, low_bit(bits=16))),
    Form("bf16, Split(8)", masters(SPLIT8)),
    Form("bf16, Split(8), 8-bit moments", masters(SPLIT8, low_bit(bits=8))),
    Form("bf16, stochastic rounding", masterless()),
    Form("bf16, stochastic rounding, 8-bit moments", masterless(low_bit(bits=8))),
)


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Attributes:
        title: what it is, and what its loss is.
        steps: how many, for a whole run.
        init: from a key to float32 params.
        draw: from a key to a batch.
        loss: of params and a batch, in float32.
        held_out: the batch that the final loss is of.
    """

    title: str
    steps: int
    init: Callable[[jax.Array], optax.Params]
    draw: Callable[[jax.Array], Batch]
    loss: Callable[[optax.Params, Batch], jax.Array]
    held_out: Batch


def draw_rows(rows: Batch, count: int) -> Callable[[jax.Array], Batch]:
    """Return the function that draws `count` rows with replacement."""
    size = len(jax.tree.leaves(rows)[0])

    def draw(key: jax.Array) -> Batch:
        chosen = jax.random.randint(key, (count,), 0, size)
        return jax.tree.map(lambda row: jnp.asarray(row)[chosen], rows)

    return draw


def init_layer(key: jax.Array, *shape: int) -> dict[str, jax.Array]:
    """Return a weight that keeps the size of what rectified inputs it gets."""
    scale = (2 / np.prod(shape[:-1])) ** 0.5
    return {
        "weight": scale * jax.random.normal(key, shape),
        "bias": jnp.zeros(shape[-1]),
    }


def transformer() -> Task:
    """Return the demo's task, for fewer steps."""
    text, held_out = map(jnp.asarray, read_corpus(DEFAULTS.context))

    def loss(params: optax.Params, windows: jax.Array) -> jax.Array:
        return make_loss(DEFAULTS, params["logits"].dtype)(params, windows)

    return Task(
        title="transformer on text, nats per character",
        steps=1200,
        init=lambda key: init_params(key, DEFAULTS),
        draw=drawer(text, DEFAULTS),
        loss=loss,
        held_out=held_out,
    )


def convolve(x: jax.Array, layer: dict[str, jax.Array], stride: int) -> jax.Array:
    """Apply a convolution, channels last."""
    axes = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    return layer["bias"] + jax.lax.conv_general_dilated(
        x, layer["weight"], strides, "SAME", dimension_numbers=axes
    )


def digits() -> Task:
    """Return a conv net of three layers on 8 x 8 images of digits."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:-500], order[-500:]

    def init(key: jax.Array) -> optax.Params:
        keys = jax.random.split(key, 3)
        shapes = (3, 3, 1, 16), (3, 3, 16, 32), (4 * 4 * 32, 10)
        return [init_layer(k, *shape) for k, shape in zip(keys, shapes, strict=True)]

    def loss(params: optax.Params, batch: Batch) -> jax.Array:
        x, label = batch
        first, second, last = params
        x = x.astype(last["weight"].dtype)
        x = jax.nn.relu(convolve(x, first, stride=1))
        x = jax.nn.relu(convolve(x, second, stride=2))
        logits = x.reshape(len(x), -1) @ last["weight"] + last["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), label
        ).mean()

    return Task(
        title="conv net on digits, cross-entropy in nats",
        steps=500,
        init=init,
        draw=draw_rows((images[train], labels[train]), 32),
        loss=loss,
        held_out=(images[held_out], labels[held_out]),
    )


def regression() -> Task:
    """Return an MLP on Friedman's function of 10 inputs, with noise of variance 1."""
    x, y = make_friedman1(n_samples=50000, noise=1.0, random_state=0)
    x, y = (4 * x - 2).astype(np.float32), y.astype(np.float32)
    # The net's output is of order 1, and the loss as of `y`: at best the noise's 1.
    center, spread = y.mean(), y.std()

    def init(key: jax.Array) -> optax.Params:
        keys = jax.random.split(key, 3)
        shapes = (10, 128), (128, 128), (128, 1)
        return [init_layer(k, *shape) for k, shape in zip(keys, shapes, strict=True)]

    def loss(params: optax.Params, batch: Batch) -> jax.Array:
        x, y = batch
        *hidden, last = params
        x = x.astype(last["weight"].dtype)
        for layer in hidden:
            x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
        found = (x @ last["weight"] + last["bias"])[:, 0].astype(jnp.float32)
        return jnp.mean(jnp.square(center + spread * found - y))

    return Task(
        title="MLP regression, squared error",
        steps=8000,
        init=init,
        draw=draw_rows((x[:-5000], y[:-5000]), 64),
        loss=loss,
        held_out=(x[-5000:], y[-5000:]),
    )


TASKS = transformer, digits, regression


def final_losses(
    task: Task, form: Form, seeds: int, settings: Settings = DEFAULTS
) -> tuple[np.ndarray, float]:
    """Train once for each seed; return the held-out losses and the bytes per weight."""
    tx = form.wrap(make_adamw(replace(settings, steps=task.steps)))

    def start(seed: jax.Array) -> tuple[optax.Params, optax.OptState]:
        params = task.init(jax.random.fold_in(jax.random.key(seed), 0))
        params = optax_mp.cast_floating(params, form.param_dtype)
        return params, tx.init(params)

    def run(seed: jax.Array) -> jax.Array:
        batch_key = jax.random.fold_in(jax.random.key(seed), 1)

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, opt_state = carry
            batch = task.draw(jax.random.fold_in(batch_key, number))
            grads = jax.grad(task.loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        (params, _), _ = jax.lax.scan(step, start(seed), jnp.arange(task.steps))
        return task.loss(params, task.held_out)

    losses = jax.jit(lambda all_seeds: jax.lax.map(run, all_seeds))(jnp.arange(seeds))
    params, opt_state = jax.jit(start)(0)
    report = optax_mp.memory_report(opt_state, params)
    return np.asarray(losses), report.bytes_per_weight


def measure(task: Task, seeds: int) -> list[dict[str, Any]]:
    """Train in all forms; return a row for each."""
    # Models this small leave a second core idle; it takes another form.
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda form: final_losses(task, form, seeds), FORMS))
    reference = results[0][0]
    return [
        {
            "form": form.name,
            "bytes per weight": held,
            "loss": float(losses.mean()),
            "±": float(losses.std(ddof=min(1, seeds - 1))),
            "to float32": float(losses.mean() / reference.mean()),
            "in its spread": ""
            if losses is reference
            else record.place_in(reference, losses),
            "losses": losses.tolist(),
        }
        for form, (losses, held) in zip(FORMS, results, strict=True)
    ]


def main() -> None:
    """Read the options and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    record.add_option(parser)
    args = parser.parse_args()
    print(f"{record.heading(jax.devices())}, {args.seeds} seeds")
    tables = {}
    for make in TASKS:
        task = make()
        title = f"{task.title}, after {task.steps} steps"
        tables[title] = measure(task, args.seeds)
        print(f"\n### {title}\n\n{record.as_markdown(tables[title])}", flush=True)
    packages = ("jax", "optax", "scikit-learn")
    record.finish(args.json, tables, record.machine_of(jax.devices()), packages)


if __name__ == "__main__":
    main()
