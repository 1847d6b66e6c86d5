"""An average of weights over time (EMA): of float32 masters, not of bfloat16 params.

An EMA moves by a thousandth of the difference per step. In bfloat16, whose spacing is
a 256th, it does not move at all. A float32 EMA of bfloat16 params averages rounded
values: it misses every move of a weight by less than half a unit.
The library appears in the line of `tx`, in `cast_floating` and in `master_params`,
which `optax.incremental_update` averages.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

tx = optax_mp.mixed_precision(optax.adamw(2e-3))
STEP_SIZE = 1e-3  # that is, a decay of 0.999


def data(steps=500, seed=0):
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


def train(batches):
    """Return three averages, and the masters at every step to check them by."""

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, opt_state, ema, x, y):
        grads = jax.grad(loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        weights = optax_mp.master_params(opt_state, params)
        seen = {"masters": weights, "params": params, "params in bfloat16": params}
        ema = optax.incremental_update(seen, ema, STEP_SIZE)  # in the dtype of `ema`
        return params, opt_state, ema

    params = optax_mp.cast_floating(init(), jnp.bfloat16)
    opt_state = tx.init(params)
    start = optax_mp.cast_floating(params, jnp.float32)
    ema = {"masters": start, "params": start, "params in bfloat16": params}
    ema = jax.tree.map(jnp.copy, ema)  # buffers of their own, so that all are donated
    history = []
    for x, y in zip(*batches, strict=True):
        params, opt_state, ema = step(params, opt_state, ema, x, y)
        history.append(jax.device_get(optax_mp.master_params(opt_state, params)))
    return ema, history


def errors(ema, history, start):
    """Return how far each average is from that in float64, over how far that went."""
    exact = start = jax.tree.map(np.float64, start)
    for weights in history:
        exact = jax.tree.map(lambda e, w: e + STEP_SIZE * (w - e), exact, weights)
    moved = optax.tree.norm(jax.tree.map(np.subtract, exact, start))
    return {
        name: float(
            optax.tree.norm(jax.tree.map(lambda a, b: np.float64(a) - b, each, exact))
            / moved
        )
        for name, each in ema.items()
    }


def main():
    """Train, and compare the averages with one in float64."""
    ema, history = train(data())
    start = optax_mp.cast_floating(init(), jnp.bfloat16)
    for name, error in errors(ema, history, start).items():
        print(f"EMA of {name}: off by {error:.2%} of the way")


if __name__ == "__main__":
    main()
