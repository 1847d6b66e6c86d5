"""The model of the demo: a small decoder-only transformer over ASCII characters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_mp._demo.settings import Settings
from optax_mp._tree import cast_floating

ASCII_SIZE = 128

LossFunction = Callable[[optax.Params, jax.Array], jax.Array]


# Compiled once for all runs.
@partial(jax.jit, static_argnames="settings")
def init_params(key: jax.Array, settings: Settings) -> optax.Params:
    """Return float32 params of a decoder-only transformer over ASCII characters."""
    width = settings.width
    keys = iter(jax.random.split(key, 2 + 4 * settings.layer_count))

    def normal(rows: int, columns: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), (rows, columns), jnp.float32)

    def gain() -> jax.Array:
        return jnp.ones(width, jnp.float32)

    def layer() -> dict[str, jax.Array]:
        # Each layer adds twice to the residual stream, which should stay of order 1.
        out_scale = (2 * settings.layer_count) ** -0.5
        return {
            "attention_norm": gain(),
            "attention_in": normal(width, 3 * width, width**-0.5),
            "attention_out": normal(width, width, out_scale * width**-0.5),
            "mlp_norm": gain(),
            "mlp_in": normal(width, 4 * width, width**-0.5),
            "mlp_out": normal(4 * width, width, out_scale * (4 * width) ** -0.5),
        }

    return {
        "characters": normal(ASCII_SIZE, width, 1.0),
        "layers": [layer() for _ in range(settings.layer_count)],
        "final_norm": gain(),
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
    cos = jnp.asarray(np.cos(angles), x.dtype)
    sin = jnp.asarray(np.sin(angles), x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin], axis=-1
    )


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


def predict(params: Any, characters: jax.Array, head_count: int) -> jax.Array:
    """Return the logits of the character after each one."""
    x = params["characters"][characters]
    for layer in params["layers"]:
        x += attention(rms_norm(x, layer["attention_norm"]), layer, head_count)
        hidden = jax.nn.gelu(rms_norm(x, layer["mlp_norm"]) @ layer["mlp_in"])
        x += hidden @ layer["mlp_out"]
    return rms_norm(x, params["final_norm"]) @ params["logits"]


def make_loss(settings: Settings, compute_dtype: DTypeLike) -> LossFunction:
    """Return the mean cross-entropy of windows, in float32 for any compute dtype."""

    def loss(params: optax.Params, windows: jax.Array) -> jax.Array:
        windows = windows.astype(jnp.int32)
        params = cast_floating(params, compute_dtype)
        logits = predict(params, windows[:, :-1], settings.head_count)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), windows[:, 1:]
        ).mean()

    return loss


@partial(jax.jit, static_argnames=("settings", "compute_dtype"))
def mean_loss(
    params: optax.Params, windows: jax.Array, settings: Settings, compute_dtype: str
) -> jax.Array:
    """Return the loss of many windows, for evaluation."""
    return make_loss(settings, compute_dtype)(params, windows)
