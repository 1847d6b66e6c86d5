"""The task of the demo: a small decoder-only transformer predicts a novel's letters."""

import bz2
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import optax_mp

ASCII_SIZE = 128
HELD_OUT_WINDOWS = 256
LossFunction = Callable[[optax.Params, jax.Array], jax.Array]


@dataclass(frozen=True)
class Settings:
    """The model's size, the optimizer's rates and the length of a run.

    How much plain bfloat16 loses depends on the learning rate, because rounding drops
    updates that are small compared with their weight. 3e-3 is a compromise: large
    models need far lower rates. docs/evidence.md has the losses at other rates.
    """

    steps: int = 350
    seeds: tuple[int, ...] = (0, 1)
    width: int = 64
    layer_count: int = 2
    head_count: int = 4
    context: int = 64
    batch_size: int = 4
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    weight_decay: float = 0.1


def read_corpus(context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ASCII codes of nine tenths of a novel, and windows of its last tenth.

    It is Pride and Prejudice: TEXT.md.
    """
    packed = Path(__file__).with_name("pride_and_prejudice.txt.bz2").read_bytes()
    codes = np.frombuffer(bz2.decompress(packed), np.uint8)
    train, held_out = np.split(codes, [codes.size - codes.size // 10])
    window = context + 1  # Every character except the first is predicted.
    starts = np.linspace(0, held_out.size - window, HELD_OUT_WINDOWS).astype(int)
    return train, held_out[starts[:, None] + np.arange(window)]


# Compiled once for all runs.
@partial(jax.jit, static_argnames="settings")
def init_params(key: jax.Array, settings: Settings) -> optax.Params:
    """Return float32 params."""
    width, gain = settings.width, jnp.ones(settings.width, jnp.float32)
    keys = iter(jax.random.split(key, 2 + 4 * settings.layer_count))
    # Each layer adds twice to the residual stream, which should stay of order 1.
    out_scale = (2 * settings.layer_count) ** -0.5

    def normal(rows: int, columns: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), (rows, columns), jnp.float32)

    def layer() -> dict[str, jax.Array]:
        return {
            "attention_norm": gain,
            "attention_in": normal(width, 3 * width, width**-0.5),
            "attention_out": normal(width, width, out_scale * width**-0.5),
            "mlp_norm": gain,
            "mlp_in": normal(width, 4 * width, width**-0.5),
            "mlp_out": normal(4 * width, width, out_scale * (4 * width) ** -0.5),
        }

    return {
        "characters": normal(ASCII_SIZE, width, 1.0),
        "layers": [layer() for _ in range(settings.layer_count)],
        "final_norm": gain,
        "logits": normal(width, ASCII_SIZE, width**-0.5),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Normalise the last axis in float32, as is usual in low-precision training."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * gain


def rotate(x: jax.Array) -> jax.Array:
    """Rotate queries or keys by their position, so that attention sees distances."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(length)[:, None, None] * frequencies
    cos, sin = (jnp.asarray(of(angles), x.dtype) for of in (np.cos, np.sin))
    left, right = jnp.split(x, 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1)


def attention(x: jax.Array, layer: dict[str, jax.Array], head_count: int) -> jax.Array:
    """Causal self-attention."""
    batch, length, width = x.shape
    heads = (x @ layer["attention_in"]).reshape(batch, length, 3, head_count, -1)
    query, key, value = jnp.moveaxis(heads, 2, 0)
    # Written out, because `jax.nn.dot_product_attention` refuses float16 on CPU.
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(query), rotate(key))
    scores = scores.astype(jnp.float32) * query.shape[-1] ** -0.5
    is_past = np.tri(length, dtype=bool)
    weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed.reshape(batch, length, width) @ layer["attention_out"]


def predict(params: optax.Params, characters: jax.Array, head_count: int) -> jax.Array:
    """Return the logits of the character after each one."""
    x = params["characters"][characters]
    for layer in params["layers"]:
        x += attention(rms_norm(x, layer["attention_norm"]), layer, head_count)
        hidden = jax.nn.gelu(rms_norm(x, layer["mlp_norm"]) @ layer["mlp_in"])
        x += hidden @ layer["mlp_out"]
    return rms_norm(x, params["final_norm"]) @ params["logits"]


def make_loss(settings: Settings, dtype: DTypeLike) -> LossFunction:
    """Return the mean cross-entropy of windows for a model that computes in `dtype`."""

    def loss(params: optax.Params, windows: jax.Array) -> jax.Array:
        windows = windows.astype(jnp.int32)
        params = optax_mp.cast_floating(params, dtype)
        logits = predict(params, windows[:, :-1], settings.head_count)
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits.astype(jnp.float32), windows[:, 1:]).mean()

    return loss
