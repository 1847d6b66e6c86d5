"""Gradient release in plain JAX: each layer's step inside the backward pass.

The library appears in `tx`, in `scan_layers`, which stands for `jax.lax.scan`, in
`release_gradients`, which stands for `jax.value_and_grad` and the step of the layers,
and in `cast_floating`. The step of the other params, `rest`, is as ever.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

WIDTH, LAYERS = 64, 4
inner = optax_mp.low_bit_state(optax.adamw(3e-3))
tx = optax_mp.mixed_precision(inner, storage=optax_mp.Split(8))


def data(steps=60, seed=0):
    """Return batches of inputs and of a function of one of them."""
    x = np.random.default_rng(seed).normal(size=(steps, 64, 4)).astype(np.float32)
    return x, np.sin(2 * x[..., 0])


def init():
    """Return the stacked layers, and the other params."""
    up, down, into, out = jax.random.split(jax.random.key(0), 4)
    layers = {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 2 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, 2 * WIDTH, WIDTH)) / (2 * WIDTH),
    }
    rest = {"in": jax.random.normal(into, (4, WIDTH)) / 2}
    rest |= {"out": jax.random.normal(out, (WIDTH,)) / WIDTH}
    return optax_mp.cast_floating((layers, rest), jnp.bfloat16)


def loss(layers, rest, x, y):
    """Return the mean squared error."""

    @jax.checkpoint
    def block(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, _ = optax_mp.scan_layers(block, x.astype(jnp.bfloat16) @ rest["in"], layers)
    return jnp.mean(((x @ rest["out"]).astype(jnp.float32) - y) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def step(layers, layers_state, rest, rest_state, x, y):
    """Return params and states after a step, and the loss."""
    release = optax_mp.release_gradients(loss, tx)
    value, grads, layers, layers_state = release(layers_state, layers, rest, x, y)
    updates, rest_state = tx.update(grads, rest_state, rest)
    return layers, layers_state, optax.apply_updates(rest, updates), rest_state, value


if __name__ == "__main__":
    layers, rest = init()
    run = layers, jax.vmap(tx.init)(layers), rest, tx.init(rest)
    for x, y in zip(*data(), strict=True):
        *run, value = step(*run, x, y)
    print(f"loss: {value:.4f}")
