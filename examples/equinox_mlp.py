"""Equinox: a module with static leaves, `eqx.apply_updates`, float32 masters.

The library appears in `FORMS`, in `value_and_grad` (instead of
`eqx.filter_value_and_grad`: it also differentiates the floating arrays of a module, and
leaves its functions alone), in `cast_floating` and in `master_params`.

`eqx.apply_updates` adds without casting back, and here the updates are float32. So the
sum is cast back, which is exact. (A model with float32 leaves: `Policy.cast_to_param`.)
With `mixed_precision(adamw, update_dtype="params")` no cast is needed, but a param can
be half a unit off for one step, and `Split` does not have that setting.
"""

import equinox as eqx
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


def loss(model, x, y):
    """Return the mean squared error; the model computes in its params' dtype."""
    predicted = jax.vmap(model)(x.astype(model.layers[0].weight.dtype))
    return jnp.mean((predicted.astype(jnp.float32) - y) ** 2)


def train(dtype, tx, batches):
    """Return model, optimizer state and the loss of each step."""

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        value, grads = optax_mp.value_and_grad(loss)(opt_state, model, *batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        model = eqx.apply_updates(model, updates)
        return optax_mp.cast_floating(model, dtype), opt_state, value

    model = eqx.nn.MLP(4, "scalar", 64, 1, jnp.tanh, key=jax.random.key(0))
    model = optax_mp.cast_floating(model, dtype)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for batch in zip(*batches, strict=True):
        model, opt_state, value = step(batch, model, opt_state)
        losses.append(value)
    return model, opt_state, losses


def float32_model(model, opt_state):
    """Return the model with the masters as its weights."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(optax_mp.master_params(opt_state, params), static)


def main():
    """Train in every form; evaluate a model with the float32 weights."""
    for name, (dtype, tx) in FORMS.items():
        model, opt_state, _ = train(dtype, tx, data())
        if name != "float32":
            model = float32_model(model, opt_state)
        x, y = data(1, seed=1)
        print(f"{name}: {eqx.filter_jit(loss)(model, x[0], y[0]):.4f}")


if __name__ == "__main__":
    main()
