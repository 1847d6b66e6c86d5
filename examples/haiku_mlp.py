"""Haiku: transformed functions, float32 masters in the optimizer state.

The library appears in `FORMS` (one line for each optimizer), in `cast_floating`, in
`value_and_grad`, which scales the loss where the state holds a loss scale, and in
`master_params`. Haiku computes in the dtype that inputs and params have.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

adamw = optax.adamw(2e-2)
masters = optax_mp.mixed_precision(adamw)
FORMS = {
    "float32": (jnp.float32, adamw),
    "bfloat16": (jnp.bfloat16, masters),
    "float16": (jnp.float16, optax_mp.dynamic_loss_scale(masters)),
    "compact": (
        jnp.bfloat16,
        optax_mp.mixed_precision(adamw, storage=optax_mp.Split()),
    ),
}


def data(steps=150, seed=0):
    """Return batches of inputs and of a noisy function of one of them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps, 64, 4)).astype(np.float32)
    noise = random.normal(size=(steps, 64)).astype(np.float32)
    return x, np.sin(2 * x[..., 0]) + 0.3 * noise


@hk.without_apply_rng
@hk.transform
def net(x):
    """Return a number for each row of `x`."""
    return hk.nets.MLP([64, 1], activation=jnp.tanh)(x)[..., 0]


def loss(params, x, y):
    """Return the mean squared error."""
    x = x.astype(params["mlp/~/linear_0"]["w"].dtype)
    return jnp.mean((net.apply(params, x).astype(jnp.float32) - y) ** 2)


def train(dtype, tx, batches):
    """Return params, optimizer state and the loss of each step."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x, y):
        value, grads = optax_mp.value_and_grad(loss)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = net.init(jax.random.key(0), jnp.zeros((1, 4)))
    params = optax_mp.cast_floating(params, dtype)
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
