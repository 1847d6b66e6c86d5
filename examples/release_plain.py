"""Gradient release in plain JAX: each layer's step inside the backward pass.

The library appears in `tx`; in `scan_layers`, in place of `jax.lax.scan`; and in
`release_gradients`, in place of `jax.value_and_grad` and of the step of the layers.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import optax_mp

inner = optax_mp.low_bit_state(optax.adamw(3e-3))
tx = optax_mp.mixed_precision(inner, storage=optax_mp.Split(8))


def init():
    """Return four stacked layers, and the other params."""
    up, down, into, out = jax.random.split(jax.random.key(0), 4)
    layers = {
        "up": jax.random.normal(up, (4, 64, 128)) / 8,
        "down": jax.random.normal(down, (4, 128, 64)) / 128,
    }
    rest = {"into": jax.random.normal(into, (4, 64)), "out": jnp.ones(64) / 64}
    return optax_mp.cast_floating((layers, rest), jnp.bfloat16)


def loss(layers, rest, x, y):
    """Return the mean squared error."""

    @jax.checkpoint
    def block(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, _ = optax_mp.scan_layers(block, x.astype(jnp.bfloat16) @ rest["into"], layers)
    return jnp.mean(((x @ rest["out"]).astype(jnp.float32) - y) ** 2)


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
