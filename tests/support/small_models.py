"""Small nets of each framework, as their users write them, with noisy data.

Nothing here knows of precision. The labels are noisy, so that the loss settles well
above zero and a relative error of it says something.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

STEPS = 100
BATCH = 32
LENGTH = 8
VOCABULARY = 12
WIDTH = 16
HEADS = 2
RATE = 0.1


class Problem(NamedTuple):
    """A loss, where training starts, and what comes in."""

    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    params: Any
    state: Any  # statistics, and with NNX the dropout keys; goes from step to step
    batches: Any  # with a leading axis of steps


def tokens():
    """Return tokens, and for each a label that depends on it and the one before."""
    random = np.random.default_rng(0)
    x = random.integers(VOCABULARY, size=(STEPS, BATCH, LENGTH))
    y = (x + np.roll(x, 1, -1) // 4) % VOCABULARY
    noise = random.integers(VOCABULARY, size=y.shape)
    return x, np.where(random.random(y.shape) < 0.4, noise, y), keys()


def sequences():
    """Return sequences of vectors, and a noisy linear function of each vector."""
    random = np.random.default_rng(1)
    x = random.normal(size=(STEPS, BATCH, LENGTH, WIDTH)).astype(np.float32)
    y = x @ random.normal(size=WIDTH) / 4 + random.normal(size=x.shape[:-1])
    return x, y.astype(np.float32), keys()


def images():
    """Return images of an odd range, and noisy scores of how bright each channel is."""
    random = np.random.default_rng(2)
    bright = random.normal(size=(STEPS, BATCH, 3))
    x = bright[:, :, None, None] + random.normal(size=(STEPS, BATCH, 8, 8, 3))
    y = bright @ np.array([2.0, -1.0, 0.5]) + random.normal(size=bright.shape[:2])
    return (5 * x + 3).astype(np.float32), y.astype(np.float32)


def noise():
    """Return images with noise, how much, and the noise, of which some can be told."""
    random = np.random.default_rng(5)
    bright = random.normal(size=(STEPS, BATCH, 1, 1, 3))
    level = random.uniform(0.2, 1.5, size=(STEPS, BATCH, 1))
    added = random.normal(size=(STEPS, BATCH, 8, 8, 3))
    x = bright + level[..., None, None] * added
    return tuple(array.astype(np.float32) for array in (x, level, added))


def keys():
    """Return a key for each step."""
    return jax.random.split(jax.random.key(3), STEPS)


def cross_entropy(logits, labels):
    """Return the mean loss of integer labels."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def linen_transformer():
    """Return a transformer in Flax Linen, with tied embeddings."""
    nn = pytest.importorskip("flax.linen")

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x):
            embed = nn.Embed(VOCABULARY, WIDTH)
            mask = nn.make_causal_mask(x)
            x = embed(x)
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(
                num_heads=HEADS, dropout_rate=RATE, deterministic=False
            )(y, mask=mask)
            x = x + nn.Dropout(RATE, deterministic=False)(y)
            y = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
            x = x + nn.Dense(WIDTH)(y)
            return embed.attend(nn.LayerNorm()(x))

    model, batches = Transformer(), tokens()
    first = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.jit(model.init)(first, batches[0][0])["params"]

    def loss(params, state, batch):
        x, y, key = batch
        logits = model.apply({"params": params}, x, rngs={"dropout": key})
        return cross_entropy(logits, y), state

    return Problem(loss, params, {}, batches)


def functional(nnx, model, loss_of_model, batches):
    """Return a problem of an NNX module, split as its functional API does."""
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def loss(params, state, batch):
        # A copy, for NNX lets nobody write to variables of a trace around this one.
        model = nnx.merge(graph, params, jax.tree.map(lambda x: x, state))
        value = loss_of_model(model, *batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    return Problem(loss, params, state, batches)


def nnx_convolutions():
    """Return a convolutional net with batch norms in Flax NNX."""
    nnx = pytest.importorskip("flax.nnx")

    class Convolutions(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.first_norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
            self.second = nnx.Conv(8, 16, (3, 3), rngs=rngs)
            self.second_norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
            self.head = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.first_norm(self.first(x)))
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
            x = nnx.relu(self.second_norm(self.second(x)))
            return self.head(x.mean((1, 2)))[:, 0]

    return functional(
        nnx,
        nnx.jit(lambda: Convolutions(nnx.Rngs(0)))(),
        lambda model, x, y: optax.losses.huber_loss(model(x), y).mean(),
        images(),
    )


def nnx_u_net(dtype=None, are_shapes_enough=False):
    """Return a U-Net that tells noise from image, in Flax NNX, as one writes it.

    Its forward pass has 17 products.

    Args:
        dtype: the `dtype` of all layers.
        are_shapes_enough: whether to return shapes in place of params.
    """
    nnx = pytest.importorskip("flax.nnx")

    def convolution(ins, outs, size, rngs, strides=1):
        return nnx.Conv(ins, outs, (size, size), strides, dtype=dtype, rngs=rngs)

    def linear(ins, outs, rngs):
        return nnx.Linear(ins, outs, dtype=dtype, rngs=rngs)

    def norm(width, rngs):
        return nnx.GroupNorm(width, num_groups=2, dtype=dtype, rngs=rngs)

    class Block(nnx.Module):
        def __init__(self, ins, outs, rngs):
            self.first = convolution(ins, outs, 3, rngs)
            self.level = linear(WIDTH, outs, rngs)
            self.first_norm = norm(ins, rngs)
            self.second_norm = norm(outs, rngs)
            self.second = convolution(outs, outs, 3, rngs)
            self.has_skip = ins != outs
            if self.has_skip:
                self.skip = convolution(ins, outs, 1, rngs)

        def __call__(self, x, level):
            y = self.first(nnx.silu(self.first_norm(x)))
            y = y + self.level(level)[:, None, None]
            y = self.second(nnx.silu(self.second_norm(y)))
            return y + (self.skip(x) if self.has_skip else x)

    class Attention(nnx.Module):
        def __init__(self, width, rngs):
            self.norm = norm(width, rngs)
            self.inputs = linear(width, 3 * width, rngs)
            self.out = linear(width, width, rngs)

        def __call__(self, x):
            q, k, v = jnp.split(self.inputs(self.norm(x)), 3, -1)
            scores = jnp.einsum("bhwc,bijc->bhwij", q, k) / q.shape[-1] ** 0.5
            scores = jax.nn.softmax(scores.reshape(*scores.shape[:3], -1))
            scores = scores.reshape(*scores.shape[:3], *x.shape[1:3])
            return x + self.out(jnp.einsum("bhwij,bijc->bhwc", scores, v))

    class UNet(nnx.Module):
        def __init__(self, rngs):
            self.level_in = linear(1, WIDTH, rngs)
            self.level_out = linear(WIDTH, WIDTH, rngs)
            self.first = convolution(3, 8, 3, rngs)
            self.down = Block(8, 8, rngs)
            self.pool = convolution(8, 8, 3, rngs, strides=2)
            self.middle = Attention(8, rngs)
            self.widen = nnx.ConvTranspose(8, 8, (2, 2), 2, dtype=dtype, rngs=rngs)
            self.up = Block(16, 8, rngs)
            self.last_norm = norm(8, rngs)
            self.last = convolution(8, 3, 3, rngs)

        def __call__(self, x, level):
            level = self.level_out(nnx.silu(self.level_in(level)))
            fine = self.down(self.first(x), level)
            coarse = self.widen(self.middle(self.pool(fine)))
            x = self.up(jnp.concatenate([coarse, fine], -1), level)
            return self.last(nnx.silu(self.last_norm(x)))

    def loss(model, x, level, added):
        predicted = model(x, level).astype(jnp.float32)
        return optax.losses.squared_error(predicted, added).mean()

    make = lambda: UNet(nnx.Rngs(0))  # noqa: E731
    model = nnx.eval_shape(make) if are_shapes_enough else nnx.jit(make)()
    return functional(nnx, model, loss, noise())


def equinox_transformer():
    """Return a transformer in Equinox: one example a call, functions in the module."""
    eqx = pytest.importorskip("equinox")

    class Transformer(eqx.Module):
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        dropout: eqx.nn.Dropout
        mlp: eqx.nn.MLP
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.attention = eqx.nn.MultiheadAttention(
                HEADS, WIDTH, dropout_p=RATE, key=keys[0]
            )
            self.dropout = eqx.nn.Dropout(RATE)
            self.mlp = eqx.nn.MLP(
                WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=keys[1]
            )
            self.head = eqx.nn.Linear(WIDTH, "scalar", key=keys[2])

        def __call__(self, x, key):
            for_attention, for_output = jax.random.split(key)
            y = jax.vmap(self.norm)(x)
            y = self.attention(y, y, y, key=for_attention)
            x = x + self.dropout(y, key=for_output)
            return jax.vmap(self.head)(x + jax.vmap(self.mlp)(x))

    params, rest = eqx.partition(
        eqx.filter_jit(Transformer)(jax.random.key(0)), eqx.is_inexact_array
    )

    def loss(params, state, batch):
        x, y, key = batch
        model = eqx.combine(params, rest)
        outputs = jax.vmap(model)(x, jax.random.split(key, len(x)))
        return optax.losses.squared_error(outputs, y).mean(), state

    return Problem(loss, params, {}, sequences())


def haiku_transformer():
    """Return a transformer in Haiku."""
    hk = pytest.importorskip("haiku")

    def norm(x):
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def forward(x):
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH)))[None, None]
        x = hk.Embed(VOCABULARY, WIDTH)(x)
        y = norm(x)
        initial = hk.initializers.VarianceScaling()
        y = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=initial)(
            y, y, y, mask=mask
        )
        x = x + hk.dropout(hk.next_rng_key(), RATE, y)
        y = hk.nets.MLP([2 * WIDTH, WIDTH], activation=jax.nn.gelu)(norm(x))
        return hk.Linear(VOCABULARY)(norm(x + y))

    model, batches = hk.transform(forward), tokens()
    params = jax.jit(model.init)(jax.random.key(0), batches[0][0])

    def loss(params, state, batch):
        x, y, key = batch
        return cross_entropy(model.apply(params, key, x), y), state

    return Problem(loss, params, {}, batches)
