"""Gradient release with Flax Linen: the params of `nn.scan`, scanned by the loss.

The model is initialized, and used elsewhere, as ever. The loss applies its parts by
themselves, and the layers with `scan_layers`.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

tx = optax_mp.mixed_precision(optax.adamw(3e-3), storage=optax_mp.Split())
into, out = nn.Dense(64, dtype=jnp.bfloat16), nn.Dense(1, dtype=jnp.bfloat16)


class Block(nn.Module):
    """A layer; it returns a pair, for `nn.scan`."""

    @nn.compact
    def __call__(self, x):
        """Return the new activations, and nothing to stack."""
        y = nn.gelu(nn.Dense(128, dtype=jnp.bfloat16)(x))
        return x + nn.Dense(64, dtype=jnp.bfloat16)(y), None


class Net(nn.Module):
    """Four layers between two others."""

    @nn.compact
    def __call__(self, x):
        """Return a number for each row of `x`."""
        layers = nn.scan(Block, {"params": 0}, {"params": True}, length=4)
        x, _ = layers(name="layers")(into.clone(name="into")(x))
        return out.clone(name="out")(x)[..., 0]


def data(steps=60, seed=0):
    """Return batches of inputs and of a function of one of them."""
    x = np.random.default_rng(seed).normal(size=(steps, 64, 4)).astype(np.float32)
    return x, np.sin(2 * x[..., 0])


def init():
    """Return the stacked layers, and the other params."""
    params = Net().init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    rest = optax_mp.cast_floating(params, jnp.bfloat16)
    return rest.pop("layers"), rest


def loss(layers, rest, x, y):
    """Return the mean squared error."""
    block = jax.checkpoint(lambda x, w: Block().apply({"params": w}, x))
    x, _ = optax_mp.scan_layers(block, into.apply({"params": rest["into"]}, x), layers)
    predicted = out.apply({"params": rest["out"]}, x)[..., 0]
    return jnp.mean((predicted.astype(jnp.float32) - y) ** 2)
