"""Final held-out losses of every form of AdamW, against float32 over several seeds.

    python benchmarks/convergence.py                    # all tasks, Markdown tables
    python benchmarks/convergence.py --plot losses.png  # and a plot, by matplotlib
    python benchmarks/convergence.py --steps-factor 0.05 --seeds 2 --tasks digits

A form says in what dtype the params are, and how masters and moments are kept. Three
models are trained in each: the demo's transformer on the help texts of Python, a small
conv net on scikit-learn's digits, and an MLP on Friedman's function with noise. A seed
sets initialisation and batches, the same for all forms. Gradients are taken at the
params as they are, so in bfloat16 in all forms but float32; the held-out loss is that
of the params as they are, too, in their dtype.

The models being small, `low_bit_state` is told to quantise arrays from 256 elements on
instead of 4096, so that all matrices but the tiniest are, and no norms and biases.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits, make_friedman1

import optax_mp
from optax_mp._demo import (
    DEFAULTS,
    init_params,
    make_adamw,
    make_corpus,
    make_loss,
    read_text,
)

try:
    from matplotlib import pyplot
except ImportError:
    pyplot = None

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
    Form("bf16, FullCopy, bf16 moments", masters(FULL, low_bit(dtype=jnp.bfloat16))),
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
    corpus = make_corpus(read_text(None), DEFAULTS.context)
    text, window = jnp.asarray(corpus.train), np.arange(DEFAULTS.context + 1)

    def draw(key: jax.Array) -> jax.Array:
        shape = (DEFAULTS.batch_size, 1)
        return text[jax.random.randint(key, shape, 0, text.size - window.size) + window]

    return Task(
        title="transformer on text, nats a character",
        steps=1200,
        init=lambda key: init_params(key, DEFAULTS),
        draw=draw,
        loss=make_loss(DEFAULTS),
        held_out=jnp.asarray(corpus.held_out),
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


TASKS = {"transformer": transformer, "digits": digits, "regression": regression}


def final_losses(task: Task, form: Form, seeds: int) -> tuple[np.ndarray, float]:
    """Train once for each seed; return the held-out losses and the bytes a weight."""
    tx = form.wrap(make_adamw(replace(DEFAULTS, steps=task.steps)))

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
    report = optax_mp.memory_report(*jax.jit(start)(0))
    return np.asarray(losses), report.bytes_per_weight


def measure(task: Task, seeds: int) -> dict[str, np.ndarray]:
    """Train in all forms and print the table; return the losses of each form."""

    def train(form: Form) -> tuple[np.ndarray, float]:
        began = time.perf_counter()
        found = final_losses(task, form, seeds)
        seconds = time.perf_counter() - began
        print(f"{task.title}: {form.name}, {seconds:.0f} s", file=sys.stderr)
        return found

    # Models this small leave a second core idle; it takes another form.
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(train, FORMS))
    losses = {form.name: x for form, (x, _) in zip(FORMS, results, strict=True)}
    held = {form.name: x for form, (_, x) in zip(FORMS, results, strict=True)}
    reference = next(iter(losses.values()))
    print(f"\n### {task.title}, after {task.steps} steps\n")
    print("| form | bytes a weight | loss | to float32's mean | in its spread |")
    print("|---|---|---|---|---|")
    for name, found in losses.items():
        mean, deviation = found.mean(), found.std(ddof=min(1, seeds - 1))
        unit = reference.mean()
        print(
            f"| {name} | {held[name]:.2f} | {mean:.4f} ± {deviation:.4f} "
            f"| {mean / unit:.3f} ± {deviation / unit:.3f} "
            f"| {'' if found is reference else place_in(reference, mean)} |",
            flush=True,
        )
    return losses


def place_in(reference: np.ndarray, mean: float) -> str:
    """Say where a mean is, seen from the least and the largest of the reference."""
    if mean < reference.min():
        return "under it"
    return "yes" if mean <= reference.max() else "**above it**"


def plot(path: str, results: dict[str, dict[str, np.ndarray]]) -> None:
    """Draw a dot for each run, a panel for each task, the spread of float32 shaded."""
    figure, panels = pyplot.subplots(
        1, len(results), figsize=(2 + 4 * len(results), 4), sharey=True, squeeze=False
    )
    for panel, (title, losses) in zip(panels[0], results.items(), strict=True):
        reference = next(iter(losses.values()))
        panel.axvspan(reference.min(), reference.max(), color="0.9")
        for row, found in enumerate(losses.values()):
            panel.plot(found, np.full(found.size, row), "o", alpha=0.5, color="C0")
            panel.plot(found.mean(), row, "|", markersize=16, color="C3")
        panel.set_yticks(range(len(losses)), list(losses))
        panel.set_title(title, fontsize="medium")
        panel.set_xlabel("held-out loss")
    panels[0, 0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read the options, print all tables and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps-factor", type=float, default=1.0, help="of all runs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--plot", metavar="PATH", help="where to save the plot")
    args = parser.parse_args()
    print(
        f"jax {jax.__version__}, optax {optax.__version__}, "
        f"{jax.devices()[0].device_kind} ({platform.machine()}), "
        f"{time.strftime('%Y-%m-%d')}, {args.seeds} seeds: mean ± standard deviation; "
        "the spread is from the least to the largest loss of float32"
    )
    results = {}
    for name in args.tasks:
        task = TASKS[name]()
        task = replace(task, steps=max(20, round(args.steps_factor * task.steps)))
        results[task.title] = measure(task, args.seeds)
    if args.plot and pyplot:
        plot(args.plot, results)
    elif args.plot:
        print("\nNo plot: matplotlib is not installed.")


if __name__ == "__main__":
    main()
