"""Flax NNX: `nnx.Optimizer` with the float32 masters in its state. For Flax 0.12.

The library appears in `FORMS` (what `nnx.Optimizer` is given), in `cast_floating`, in
`scale_loss`, which multiplies the loss where the optimizer holds a loss scale, and in
`master_params`. These take the optimizer and the model as they are.

`nnx.grad` gives 16-bit gradients, so `update_dtype` asks for float32 updates, which
land exactly.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_mp

adamw = optax.adamw(2e-2)
masters = optax_mp.mixed_precision(adamw, update_dtype=jnp.float32)
FORMS = {
    "float32": (jnp.float32, adamw),
    "bfloat16": (jnp.bfloat16, masters),
    "float16": (jnp.float16, optax_mp.dynamic_loss_scale(masters)),
    "compact": (
        jnp.bfloat16,
        optax_mp.mixed_precision(adamw, storage=optax_mp.Split()),
    ),
}


class MLP(nnx.Module):
    """A net with one hidden layer that computes in `dtype`."""

    def __init__(self, dtype, rngs):
        """Make the layers."""
        self.hidden = nnx.Linear(4, 64, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(64, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        """Return a number for each row of `x`."""
        return self.out(nnx.tanh(self.hidden(x)))[..., 0]


def data(steps=150, seed=0):
    """Return batches of inputs and of a noisy function of one of them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps, 64, 4)).astype(np.float32)
    noise = random.normal(size=(steps, 64)).astype(np.float32)
    return x, np.sin(2 * x[..., 0]) + 0.3 * noise


def loss(model, x, y):
    """Return the mean squared error."""
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def step(model, optimizer, x, y):
    """Change model and optimizer in place, and return the true loss."""

    def scaled_loss(model):
        value = loss(model, x, y)
        return optax_mp.scale_loss(value, optimizer), value

    grads, value = nnx.grad(scaled_loss, has_aux=True)(model)
    optimizer.update(model, grads)  # unscales, or skips
    return value


def train(dtype, tx, batches):
    """Return model, optimizer and the loss of each step."""
    model = MLP(dtype, nnx.Rngs(0))
    nnx.update(model, optax_mp.cast_floating(nnx.state(model, nnx.Param), dtype))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [step(model, optimizer, x, y) for x, y in zip(*batches, strict=True)]
    return model, optimizer, losses


def main():
    """Train in every form; evaluate a model with the float32 weights."""
    for name, (dtype, tx) in FORMS.items():
        model, optimizer, _ = train(dtype, tx, data())
        exact = MLP(jnp.float32, nnx.Rngs(0)) if name != "float32" else model
        if name != "float32":
            nnx.update(exact, optax_mp.master_params(optimizer, model))
        print(f"{name}: {loss(exact, *data(1, seed=1)):.4f}")


if __name__ == "__main__":
    main()
