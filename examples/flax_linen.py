"""Flax Linen: a `TrainState` whose optimizer holds the float32 masters.

The library appears in `FORMS` (the optimizer that `TrainState` is given), in
`cast_floating`, in `value_and_grad`, which scales the loss where the state holds a loss
scale, and in `master_params`. `apply_gradients` is Flax's own.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

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


class MLP(nn.Module):
    """A net with one hidden layer that computes in `dtype`."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        """Return a number for each row of `x`."""
        x = nn.tanh(nn.Dense(64, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype)(x)[..., 0]


def data(steps=150, seed=0):
    """Return batches of inputs and of a noisy function of one of them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps, 64, 4)).astype(np.float32)
    noise = random.normal(size=(steps, 64)).astype(np.float32)
    return x, np.sin(2 * x[..., 0]) + 0.3 * noise


def loss(params, apply_fn, x, y):
    """Return the mean squared error."""
    predicted = apply_fn({"params": params}, x)
    return jnp.mean((predicted.astype(jnp.float32) - y) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def step(state, x, y):
    """Return the next state, and the true loss."""
    loss_and_grads = optax_mp.value_and_grad(loss)
    value, grads = loss_and_grads(state.opt_state, state.params, state.apply_fn, x, y)
    return state.apply_gradients(grads=grads), value


def train(dtype, tx, batches):
    """Return the train state, and the loss of each step."""
    model = MLP(dtype)
    params = model.init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    params = optax_mp.cast_floating(params, dtype)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for x, y in zip(*batches, strict=True):
        state, value = step(state, x, y)
        losses.append(value)
    return state, losses


def main():
    """Train in every form; evaluate the float32 weights."""
    for name, (dtype, tx) in FORMS.items():
        state, _ = train(dtype, tx, data())
        weights = state.params
        if name != "float32":
            weights = optax_mp.master_params(state.opt_state, weights)
        unseen = data(1, seed=1)
        print(f"{name}: {loss(weights, MLP(jnp.float32).apply, *unseen):.4f}")


if __name__ == "__main__":
    main()
