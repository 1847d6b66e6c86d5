"""Gradient release with Flax NNX: layers made by `nnx.vmap`, split into their state."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import optax_mp

tx = optax_mp.mixed_precision(optax.adamw(3e-3), storage=optax_mp.Split())
Linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)


class Block(nnx.Module):
    """A layer."""

    def __init__(self, rngs):  # noqa: D107
        self.up, self.down = Linear(64, 128, rngs=rngs), Linear(128, 64, rngs=rngs)

    def __call__(self, x):  # noqa: D102
        return x + self.down(nnx.gelu(self.up(x)))


layer, LAYERS = nnx.split(nnx.split_rngs(splits=4)(nnx.vmap(Block))(nnx.Rngs(0)))
into, out = Linear(4, 64, rngs=nnx.Rngs(1)), Linear(64, 1, rngs=nnx.Rngs(2))
ends, REST = nnx.split([into, out])


def loss(layers, rest, x, y):
    """Return the mean squared error."""
    into, out = nnx.merge(ends, rest)
    block = jax.checkpoint(lambda x, w: (nnx.merge(layer, w)(x), None))
    x, _ = optax_mp.scan_layers(block, into(x), layers)
    return jnp.mean((out(x)[:, 0].astype(jnp.float32) - y) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def step(layers, layers_state, rest, rest_state, x, y):
    """Return params and states after a step, and the loss."""
    release = optax_mp.release_gradients(loss, tx)
    value, grads, layers, layers_state = release(layers_state, layers, rest, x, y)
    updates, rest_state = tx.update(grads, rest_state, rest)
    rest = optax.apply_updates(rest, updates)
    return layers, layers_state, rest, rest_state, value


def main():
    """Train, and print the loss of each step."""
    layers, rest = jax.tree.map(jnp.copy, (LAYERS, REST))
    run = layers, jax.vmap(tx.init)(layers), rest, tx.init(rest)
    for i, x in enumerate(jax.random.normal(jax.random.key(1), (60, 64, 4))):
        *run, value = step(*run, x, jnp.sin(2 * x[:, 0]))
        print(f"step {i}: {value:.4f}")


if __name__ == "__main__":
    main()
