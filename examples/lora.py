"""LoRA: frozen bfloat16 weights, trained adapters; only these have masters and moments.

Three ways to the same adapters, of which `FORMS` holds two optimizers over the whole
tree: `optax.partition` and `optax.masked`. The third, `train_adapters_only`,
differentiates the adapters alone, and needs no mask (nor gradients of frozen weights).
The library appears in these optimizers, in `cast_floating`, in `value_and_grad` and in
`memory_report`, which shows what each leaf costs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

# Float32 updates, so that adapters may be merged and set to zero between steps.
masters = optax_mp.mixed_precision(optax.adamw(1e-2), update_dtype=jnp.float32)
LABELS = {"frozen": "freeze", "adapters": "train"}
FORMS = {
    "partition": optax.partition(
        {"train": masters, "freeze": optax.set_to_zero()}, LABELS
    ),
    "masked": optax.chain(
        optax.masked(masters, {"frozen": False, "adapters": True}),
        optax.masked(optax.set_to_zero(), {"frozen": True, "adapters": False}),
    ),
}


def data(steps=150, seed=0):
    """Return inputs, and what `pretrained` gives once changed by a matrix of rank 2."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps, 64, 32)).astype(np.float32)
    change = np.random.default_rng(7).normal(size=(2, 32, 2)).astype(np.float32)
    changed = pretrained()["weight"] + 0.2 * change[0] @ change[1].T
    return x, np.tanh(x @ changed)


def pretrained():
    """Return the float32 weights to begin with."""
    random = np.random.default_rng(3)
    return {"weight": random.normal(size=(32, 32)).astype(np.float32) / 32**0.5}


def init():
    """Return frozen weights and adapters in bfloat16; at first they add nothing."""
    down = jax.random.normal(jax.random.key(0), (32, 2)) / 32**0.5
    adapters = {"down": down, "up": jnp.zeros((2, 32))}
    tree = {"frozen": pretrained(), "adapters": adapters}
    return optax_mp.cast_floating(tree, jnp.bfloat16)


def loss(adapters, frozen, x, y):
    """Return the mean squared error; the model computes in the params' dtype."""
    x = x.astype(frozen["weight"].dtype)
    logits = x @ frozen["weight"] + x @ adapters["down"] @ adapters["up"]
    return jnp.mean((jnp.tanh(logits.astype(jnp.float32)) - y) ** 2)


def train(tx, batches):
    """Return all params, optimizer state and the loss of each step."""

    def loss_of_all(params, x, y):
        return loss(params["adapters"], params["frozen"], x, y)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x, y):
        value, grads = optax_mp.value_and_grad(loss_of_all)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = init()
    opt_state, losses = tx.init(params), []
    for x, y in zip(*batches, strict=True):
        params, opt_state, value = step(params, opt_state, x, y)
        losses.append(value)
    return params, opt_state, losses


def train_adapters_only(batches):
    """Return what `train` does, of an optimizer that knows the adapters alone."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(adapters, opt_state, frozen, x, y):
        value, grads = optax_mp.value_and_grad(loss)(opt_state, adapters, frozen, x, y)
        updates, opt_state = masters.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, value

    frozen, adapters = (init()[part] for part in ("frozen", "adapters"))
    opt_state, losses = masters.init(adapters), []
    for x, y in zip(*batches, strict=True):
        adapters, opt_state, value = step(adapters, opt_state, frozen, x, y)
        losses.append(value)
    return {"frozen": frozen, "adapters": adapters}, opt_state, losses


def main():
    """Train in each way; show what each leaf takes with its optimizer state."""
    for name, tx in FORMS.items():
        _, _, losses = train(tx, data())
        print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    params, opt_state, losses = train_adapters_only(data())
    print(f"adapters only: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(optax_mp.memory_report(opt_state, params))


if __name__ == "__main__":
    main()
