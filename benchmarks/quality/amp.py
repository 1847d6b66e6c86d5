"""What amp keeps and gets wrong, against float32, bf16 by hand and cast arguments.

    python benchmarks amp
    python benchmarks amp --json FILE

The model is a transformer with biases and a causal mask. Errors are distances of the
gradients to float32, by norm, compiled without XLA's excess precision.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record

import optax_mp


@dataclass(frozen=True)
class Size:
    """The shape of a transformer and of its batch."""

    batch: int
    length: int
    width: int
    heads: int
    vocabulary: int
    blocks: int

    def in_words(self) -> str:
        """Say what it is, for a title."""
        return (
            f"{self.blocks} blocks, width {self.width}, {self.heads} heads, "
            f"vocabulary {self.vocabulary}, batch {self.batch} x {self.length}"
        )


SIZE = Size(8, 128, 256, 4, 1024, 4)
MASKED = -1e30


def init(size: Size) -> Any:
    """Return float32 params."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * size.blocks + 2))

    def dense(inputs: int, outputs: int) -> Any:
        kernel = jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5
        return {"kernel": kernel, "bias": jnp.zeros(outputs)}

    def norm() -> Any:
        return {"scale": jnp.ones(size.width), "bias": jnp.zeros(size.width)}

    def block() -> Any:
        width = size.width
        return {
            "norm1": norm(),
            "qkv": dense(width, 3 * width),
            "out": dense(width, width),
            "norm2": norm(),
            "up": dense(width, 4 * width),
            "down": dense(4 * width, width),
        }

    return {
        "embed": jax.random.normal(next(keys), (size.vocabulary, size.width)) * 0.02,
        "positions": jax.random.normal(next(keys), (size.length, size.width)) * 0.02,
        "blocks": [block() for _ in range(size.blocks)],
        "norm": norm(),
    }


def loss(
    params: Any,
    tokens: jax.Array,
    size: Size,
    low: Callable[[Any], Any] = lambda x: x,
    targets: jax.Array | None = None,
) -> jax.Array:
    """Return the loss; `low` casts what a careful author computes in 16 bits.

    Without it this is a float32 model, as amp gets it. Without `targets` it is to say
    the tokens themselves, which costs as much.
    """
    targets = tokens if targets is None else targets

    def full(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def dense(layer: Any, x: jax.Array) -> jax.Array:
        return low(x) @ low(layer["kernel"]) + low(layer["bias"])

    def norm(layer: Any, x: jax.Array) -> jax.Array:
        x = full(x)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(variance + 1e-5)
        return scaled * layer["scale"] + layer["bias"]

    def attend(layer: Any, x: jax.Array) -> jax.Array:
        shape = (size.batch, size.length, 3, size.heads, size.width // size.heads)
        q, k, v = jnp.moveaxis(dense(layer["qkv"], x).reshape(shape), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * shape[-1] ** -0.5
        mask = jnp.tril(jnp.ones((size.length, size.length), bool))
        weights = jax.nn.softmax(full(jnp.where(mask, scores, MASKED)))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", low(weights), v)
        return dense(layer["out"], mixed.reshape(size.batch, size.length, size.width))

    x = params["embed"][tokens] + params["positions"]
    for layer in params["blocks"]:
        x = x + attend(layer, norm(layer["norm1"], x))
        hidden = jax.nn.gelu(dense(layer["up"], norm(layer["norm2"], x)))
        x = x + dense(layer["down"], hidden)
    logits = full(low(norm(params["norm"], x)) @ low(params["embed"]).T)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -chosen.mean()


def contenders(size: Size) -> dict[str, Callable[[Any, jax.Array], jax.Array]]:
    """Return the ways to compute the loss of float32 params."""
    written = functools.partial(loss, size=size)
    by_hand = functools.partial(loss, size=size, low=lambda x: x.astype(jnp.bfloat16))

    def cast_arguments(params: Any, tokens: jax.Array) -> jax.Array:
        return written(optax_mp.cast_floating(params, jnp.bfloat16), tokens)

    return {
        "float32": written,
        "bf16 by hand": by_hand,
        "bf16 by casting arguments": cast_arguments,
        "amp, bf16": optax_mp.amp(written),
        "amp, f16": optax_mp.amp(written, compute_dtype=jnp.float16),
    }


def casts(fun: Callable[..., Any], *args: Any) -> int:
    """Return how many equations change a dtype, also in the jaxprs inside."""
    return str(jax.make_jaxpr(fun)(*args)).count("convert_element_type[")


def residual_mib(fun: Callable[..., Any], params: Any, tokens: jax.Array) -> float:
    """Return what the forward pass keeps for the backward pass."""
    pullback = jax.eval_shape(lambda p: jax.vjp(lambda p: fun(p, tokens), p)[1], params)
    kept = jax.tree.leaves(pullback)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in kept) / 2**20


def exactly(fun: Callable[..., Any], *args: Any) -> Any:
    """Return `fun(*args)`, compiled so that every cast is made."""
    options: Any = {"xla_allow_excess_precision": False}
    return jax.jit(fun).lower(*args).compile(compiler_options=options)(*args)


def relative_error(tree: Any, truth: Any) -> float:
    """Return the norm of the difference over the norm."""
    squares = np.zeros(2)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(truth), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            a, b = np.float64(a), np.float64(b)
            squares += np.sum((a - b) ** 2), np.sum(b**2)
    return float(np.sqrt(squares[0] / squares[1]))


def measure_model() -> list[record.Row]:
    """Return casts, kept bytes and error of a training step."""
    params = init(SIZE)
    shape = (SIZE.batch, SIZE.length)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, SIZE.vocabulary)
    entries = contenders(SIZE)
    steps = {key: jax.value_and_grad(fun) for key, fun in entries.items()}
    truth = exactly(steps["float32"], params, tokens)[1]
    return [
        {
            "model": key,
            "casts": casts(fun, params, tokens),
            "with gradient": casts(steps[key], params, tokens),
            "kept MiB": residual_mib(fun, params, tokens),
            "error": relative_error(exactly(steps[key], params, tokens)[1], truth),
        }
        for key, fun in entries.items()
    ]


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    record.add_option(parser)
    path = parser.parse_args().json
    devices, rows = jax.devices()[:1], measure_model()
    tables = {f"a training step of a transformer, {SIZE.in_words()}": rows}
    print(f"{record.heading(devices)}\n\n{record.as_markdown(rows)}")
    record.finish(path, tables, record.machine_of(devices), ("jax",))


if __name__ == "__main__":
    main()
