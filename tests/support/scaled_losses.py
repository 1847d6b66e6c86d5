"""Losses, params and optimizer states with a loss scale in them, for several tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp

PARAMS = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(3.0)}
LABELS = {"a": "x", "b": "y"}
HALVES = ["float16", "bfloat16"]


def scaler(scale=1024.0):
    return optax_mp.static_loss_scale(optax.adam(1e-2), scale)


def state_with(scale, params=PARAMS):
    return scaler(scale).init(params)


NO_SCALE = optax.adam(1e-2).init(PARAMS)


def quadratic(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


NESTINGS = {
    "alone": scaler,
    "a link": lambda: optax.chain(
        optax_mp.static_loss_scale(scale=1024.0), optax.adam(1e-2)
    ),
    "chain": lambda: optax.chain(scaler(), optax.identity()),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("s", scaler())),
    "masked": lambda: optax.masked(scaler(), {"a": True, "b": False}),
    "partition": lambda: optax.partition({"x": scaler(), "y": optax.sgd(0.1)}, LABELS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda learning_rate: optax_mp.static_loss_scale(
            optax.adam(learning_rate), 1024.0
        )
    )(learning_rate=0.1),
    "mixed_precision": lambda: optax_mp.mixed_precision(scaler()),
    "deep": lambda: optax.chain(
        optax.masked(
            optax.chain(optax.partition({"x": scaler(), "y": optax.sgd(0.1)}, LABELS)),
            {"a": True, "b": True},
        )
    ),
}  # fmt: skip


BAD_LOSSES = {
    "vector": (lambda x: x, r"float32\[3\]"),
    "one element": (lambda x: x[:1], r"float32\[1\]"),
    "int": (lambda x: jnp.int32(3), r"int32\[\]"),
    "complex": (lambda x: x.sum() * 1j, r"complex64\[\]"),
    "Python int": (lambda x: 3, "an int"),
    "tuple": (lambda x: (x.sum(), x), "a tuple of"),
    "None": (lambda x: None, "a NoneType"),
}


VECTOR = jnp.arange(3.0)


def network(params, x):
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"]) ** 2)


def network_params(dtype):
    rng = np.random.default_rng(0)
    shapes = {"in": (4, 8), "bias": (8,), "out": (8, 2)}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


reference_gradients = jax.jit(jax.value_and_grad(network))


BATCH = np.random.default_rng(1).normal(size=(16, 4))
