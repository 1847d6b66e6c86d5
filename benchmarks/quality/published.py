"""A tutorial of Flax NNX as it is published, and with its optimizer wrapped.

    python benchmarks published
    python benchmarks published --json FILE

It is "JAX neural net basics" of the JAX project's AI stack: an MLP of three layers on
scikit-learn's digits, by 301 steps of SGD, after which it names a loss of "around 0.10"
and "approximately 98% accuracy" on the test images:
https://docs.jaxstack.ai/en/latest/neural_net_basics.html. Each form changes the lines
that docs/guide/nnx.md says. It has one seed; ours are five, the same for all forms.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from finetune import FULL, SPLIT8, SPLIT16, interval, loss_scale, masters
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_mp

SEEDS, STEPS = 5, 301
# How each wraps SGD, and the dtype of its params. The first is as published.
FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "as published": (lambda sgd: sgd, "float32"),
    "plain bf16": (lambda sgd: sgd, "bfloat16"),
    "masters": (masters(FULL), "bfloat16"),
    "Split(16)": (masters(SPLIT16), "bfloat16"),
    "Split(8)": (masters(SPLIT8), "bfloat16"),
    "stochastic rounding": (optax_mp.stochastic_rounding, "bfloat16"),
    "f16, loss scale": (loss_scale(), "float16"),
}


class SimpleNN(nnx.Module):
    """The tutorial's model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Make three layers."""
        self.layer1 = nnx.Linear(64, 100, rngs=rngs)
        self.layer2 = nnx.Linear(100, 100, rngs=rngs)
        self.layer3 = nnx.Linear(100, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits."""
        x = nnx.selu(self.layer1(x.reshape(len(x), -1)))
        return self.layer3(nnx.selu(self.layer2(x)))


def loss_of(model: SimpleNN, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy; logits of 16 bits are made float32."""
    logits = model(images).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(
    model: SimpleNN, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> None:
    """Take a step with all images; the loss is scaled where there is a loss scale."""

    def scaled(model: SimpleNN) -> jax.Array:
        return optax_mp.scale_loss(loss_of(model, images, labels), optimizer)

    optimizer.update(model, nnx.grad(scaled)(model))


def train(form: str, seed: int, digits: list[jax.Array]) -> tuple[float, float]:
    """Return the loss and the accuracy of the test images."""
    wrap, dtype = FORMS[form]
    train_images, test_images, train_labels, test_labels = digits
    model = SimpleNN(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, wrap(optax.sgd(0.05)), wrt=nnx.Param)
    nnx.update(model, optax_mp.cast_floating(nnx.state(model, nnx.Param), dtype))
    images = train_images.astype(dtype)
    for _ in range(STEPS):
        train_step(model, optimizer, images, train_labels)
    test_images = test_images.astype(dtype)
    loss = float(loss_of(model, test_images, test_labels))
    right = model(test_images).argmax(axis=1) == test_labels
    return loss, float(right.mean())


def main() -> None:
    """Train in all forms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    record.add_option(parser)
    path = parser.parse_args().json
    digits = load_digits()
    parts = train_test_split(digits.images, digits.target, random_state=0)
    parts = [jnp.asarray(x) for x in parts]
    rows, published = [], np.empty(0)
    for form in FORMS:
        found = np.array([train(form, seed, parts) for seed in range(SEEDS)])
        losses, right = found.T
        row = {"form": form, "loss": float(losses.mean())}
        row |= {"accuracy": f"{right.mean():.1%}"}
        if form == "as published":
            published = losses
        else:
            row |= {"above": interval(losses - published)}
            row |= {"in its spread": record.place_in(published, losses)}
        rows.append(row | {"losses": found.tolist()})
        print(f"{form}: {losses}", file=sys.stderr)
    tables = {f"digits, {STEPS} steps of SGD, {SEEDS} seeds": rows}
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    packages = ("jax", "optax", "flax", "scikit-learn")
    record.finish(path, tables, record.machine_of(jax.devices()), packages)


if __name__ == "__main__":
    main()
