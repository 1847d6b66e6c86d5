"""Gradient release with Flax Linen: the loss scans the params of `nn.scan`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import optax_mp

tx = optax_mp.mixed_precision(optax.adamw(3e-3), storage=optax_mp.Split())
Dense = functools.partial(nn.Dense, dtype=jnp.bfloat16)
into, out = Dense(64), Dense(1)


class Block(nn.Module):
    """A layer. It returns a pair, for `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        """Return the new activations, and nothing to stack."""
        return x + Dense(64)(nn.gelu(Dense(128)(x))), None


def init():
    """Return four stacked layers, and the other params."""
    layers = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=4)()
    key, x = jax.random.key(0), jnp.zeros((1, 64))
    params = layers.init(key, x, None), [into.init(key, x[:, :4]), out.init(key, x)]
    return optax_mp.cast_floating(params, jnp.bfloat16)


def loss(layers, rest, x, y):
    """Return the mean squared error."""
    block = jax.checkpoint(lambda x, w: Block().apply(w, x, None))
    x, _ = optax_mp.scan_layers(block, into.apply(rest[0], x), layers)
    return jnp.mean((out.apply(rest[1], x)[:, 0].astype(jnp.float32) - y) ** 2)


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
    layers, rest = init()
    run = layers, jax.vmap(tx.init)(layers), rest, tx.init(rest)
    for i, x in enumerate(jax.random.normal(jax.random.key(1), (60, 64, 4))):
        *run, value = step(*run, x, jnp.sin(2 * x[:, 0]))
        print(f"step {i}: {value:.4f}")


if __name__ == "__main__":
    main()
