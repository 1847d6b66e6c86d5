"""Lookahead: fast and slow params, each with float32 masters.

`optax.lookahead` goes inside `mixed_precision`, around which a loss scale may stand:
then the slow params are averaged in float32. (Outside, it would move the params past
their masters, and the next step would undo it.) The library appears in the line of
`tx`, in `cast_floating`, `value_and_grad` and `master_params`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

lookahead = optax.lookahead(optax.adamw(2e-2), sync_period=5, slow_step_size=0.5)
FORMS = {
    "float32": (jnp.float32, lookahead),
    "bfloat16": (jnp.bfloat16, optax_mp.mixed_precision(lookahead)),
    "float16": (
        jnp.float16,
        optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(lookahead)),
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
    """Return fast and slow params, optimizer state and the loss of each step."""
    loss_and_grads = optax_mp.value_and_grad(loss)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x, y):
        value, grads = loss_and_grads(opt_state, params.fast, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = optax_mp.cast_floating(init(), dtype)
    params = optax.LookaheadParams.init_synced(params)
    params = jax.tree.map(jnp.copy, params)  # two copies, so that both can be donated
    opt_state, losses = tx.init(params), []
    for x, y in zip(*batches, strict=True):
        params, opt_state, value = step(params, opt_state, x, y)
        losses.append(value)
    return params, opt_state, losses


def main():
    """Train in every form; evaluate the float32 slow weights."""
    for name, (dtype, tx) in FORMS.items():
        params, opt_state, _ = train(dtype, tx, data())
        if name != "float32":
            params = optax_mp.master_params(opt_state, params)
        print(f"{name}: {loss(params.slow, *data(1, seed=1)):.4f}")


if __name__ == "__main__":
    main()
