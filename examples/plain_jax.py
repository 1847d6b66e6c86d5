"""Plain JAX: params in 16 bits, float32 masters, a loss scale, compact masters.

The library appears in `FORMS` (one line for each optimizer), in `value_and_grad`, which
scales the loss where the state holds a loss scale, and in `master_params`, which reads
the float32 weights. Everything else is the loop that one writes for float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

adamw = optax.adamw(2e-2)
FORMS = {
    "float32": (jnp.float32, adamw),
    "bfloat16": (jnp.bfloat16, optax_mp.mixed_precision(adamw)),
    "float16": (
        jnp.float16,
        optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(adamw)),
    ),
    "compact": (  # 8-bit moments where large, masters of 2 bytes per weight
        jnp.bfloat16,
        optax_mp.mixed_precision(
            optax_mp.low_bit_state(adamw, min_size=0), storage=optax_mp.Split()
        ),
    ),
}


def data(steps=150, seed=0):
    """Return batches of inputs and of a noisy function of one of them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps, 64, 4)).astype(np.float32)
    noise = random.normal(size=(steps, 64)).astype(np.float32)
    return x, np.sin(2 * x[..., 0]) + 0.3 * noise


def init():
    """Return the float32 weights of a net with one hidden layer."""
    into, out = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(into, (4, 64)) / 4**0.5,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(out, (64,)) / 64**0.5,
    }


def loss(params, x, y):
    """Return the mean squared error; the model computes in the params' dtype."""
    hidden = jnp.tanh(x.astype(params["hidden"].dtype) @ params["hidden"])
    predicted = jnp.tanh(hidden + params["bias"]) @ params["out"]
    return jnp.mean((predicted.astype(jnp.float32) - y) ** 2)


def train(dtype, tx, batches):
    """Return params, optimizer state and the loss of each step."""
    loss_and_grads = optax_mp.value_and_grad(loss)  # the true loss, scaled gradients

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x, y):
        value, grads = loss_and_grads(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = optax_mp.cast_floating(init(), dtype)
    opt_state = tx.init(params)
    losses = []
    for x, y in zip(*batches, strict=True):
        params, opt_state, value = step(params, opt_state, x, y)
        losses.append(value)
    return params, opt_state, losses


def main():
    """Train in every form; evaluate the float32 weights."""
    for name, (dtype, tx) in FORMS.items():
        params, opt_state, _ = train(dtype, tx, data())
        if name != "float32":
            params = optax_mp.master_params(opt_state, params)
        print(f"{name}: {loss(params, *data(1, seed=1)):.4f}")


if __name__ == "__main__":
    main()
