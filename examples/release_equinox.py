"""Gradient release with Equinox: stacked modules, and `jax.vmap` inside the block."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import optax_mp

tx = optax_mp.mixed_precision(optax.adamw(3e-3), storage=optax_mp.Split())


def make(key):
    """Return a layer: a net with one hidden layer."""
    mlp = eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=key)
    return optax_mp.cast_floating(mlp, jnp.bfloat16)


keys = jax.random.split(jax.random.key(0), 4)
LAYERS, static = eqx.partition(eqx.filter_vmap(make)(keys), eqx.is_inexact_array)


def init():
    """Return four stacked layers, and the other params."""
    rest = {"into": jax.random.normal(keys[0], (4, 64)), "out": jnp.ones(64) / 64}
    return jax.tree.map(jnp.copy, LAYERS), optax_mp.cast_floating(rest, jnp.bfloat16)


def loss(layers, rest, x, y):
    """Return the mean squared error."""
    block = jax.checkpoint(lambda x, w: (x + jax.vmap(eqx.combine(w, static))(x), None))
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
