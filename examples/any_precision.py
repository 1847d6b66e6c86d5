"""One script for every precision, with its metrics logged.

    python examples/any_precision.py --precision f16 --csv metrics.csv

Only `PRECISIONS` knows which precision runs. The loop, the checks, the logging and the
evaluation are the same for all: without a loss scale in the state `value_and_grad` does
not scale, `metrics` has no scale to report and `check_loss_scale` passes; without
masters `master_params` returns the params in float32.
"""

import argparse
import csv
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp


def masters(inner):
    """Return `inner` on float32 masters."""
    return optax_mp.mixed_precision(inner)


def scaled_masters(inner):
    """Return the same with a loss scale."""
    return optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(inner))


def compact_masters(inner):
    """Return `inner` with 8-bit moments and masters of 1 byte per weight."""
    moments = optax_mp.low_bit_state(inner, min_size=0)
    return optax_mp.mixed_precision(moments, storage=optax_mp.Split(bits=8))


def as_it_is(x):
    """Return an optimizer or a function unchanged."""
    return x


# Precision: (dtype of params, what wraps the optimizer, what wraps the loss).
PRECISIONS = {
    "f32": (jnp.float32, as_it_is, as_it_is),
    "bf16": (jnp.bfloat16, masters, as_it_is),
    "f16": (jnp.float16, scaled_masters, as_it_is),
    "compact": (jnp.bfloat16, compact_masters, as_it_is),
    "amp": (jnp.float32, as_it_is, optax_mp.amp),
}


def data(steps=150, seed=0):
    """Return batches of inputs and of a noisy function of one of them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps, 64, 4)).astype(np.float32)
    noise = random.normal(size=(steps, 64)).astype(np.float32)
    return x, np.sin(2 * x[..., 0]) + 0.3 * noise


def init():
    """Return the float32 weights of a net with one hidden layer."""
    into, out = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(into, (4, 64)) / 4**0.5,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(out, (64,)) / 64**0.5,
    }


def loss(params, x, y):
    """Return the mean squared error; the model computes in the params' dtype."""
    hidden = jnp.tanh(x.astype(params["hidden"].dtype) @ params["hidden"])
    predicted = jnp.tanh(hidden + params["bias"]) @ params["out"]
    return jnp.mean((predicted.astype(jnp.float32) - y) ** 2)


def train(precision, batches, loggers=()):
    """Return the weights in float32 and the loss of each step.

    Each logger is called with the number of a step and a dict of floats.
    """
    dtype, wrap_optimizer, wrap_loss = PRECISIONS[precision]
    tx = wrap_optimizer(optax.adamw(2e-2))
    loss_and_grads = optax_mp.value_and_grad(wrap_loss(loss))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x, y):
        value, grads = loss_and_grads(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        scalars = {"loss": value, **optax_mp.metrics(opt_state)}
        return optax.apply_updates(params, updates), opt_state, scalars

    params = optax_mp.cast_floating(init(), dtype)
    opt_state = tx.init(params)
    losses = []
    for number, (x, y) in enumerate(zip(*batches, strict=True)):
        params, opt_state, scalars = step(params, opt_state, x, y)
        losses.append(scalars["loss"])
        if number % 10 == 0:
            for log in loggers:
                log(number, {name: float(value) for name, value in scalars.items()})
            optax_mp.check_loss_scale(opt_state, params=params)
    return optax_mp.master_params(opt_state, params), losses


def to_csv(file):
    """Return a logger that writes a line for each step."""
    writer = csv.writer(file)

    def log(number, scalars):
        if not number:
            writer.writerow(["step", *scalars])
        writer.writerow([number, *scalars.values()])

    return log


def to_tensorboard(writer):
    """Return a logger to a `SummaryWriter` of torch or tensorboardX, or the like.

    As in `train("f16", data(), [to_tensorboard(SummaryWriter("logs"))])`.
    """

    def log(number, scalars):
        for name, value in scalars.items():
            writer.add_scalar(f"train/{name}", value, number)

    return log


def main(arguments=()):
    """Train in the precision that is asked for, or in all; evaluate in float32."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=PRECISIONS, help="by default each")
    parser.add_argument("--csv", help="file to write the metrics to")
    args = parser.parse_args(arguments)
    for precision in [args.precision] if args.precision else PRECISIONS:
        if args.csv:
            with open(args.csv, "w", newline="", encoding="utf-8") as file:
                weights, _ = train(precision, data(), [to_csv(file)])
        else:
            weights, _ = train(precision, data())
        print(f"{precision}: {loss(weights, *data(1, seed=1)):.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
