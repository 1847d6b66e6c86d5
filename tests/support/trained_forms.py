"""Runs with every form of params and state, to be saved and continued."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from steps import by_update

import optax_mp

adamw = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 20))
low_bit = functools.partial(optax_mp.low_bit_state, min_size=64)
masters = optax_mp.mixed_precision
LABELS = {"w": "trained", "norm": "trained", "frozen": "frozen"}
CHANCE = optax.add_noise(0.1, 0.5, jax.random.key(3))

UNSCALED = {
    "bare": adamw,
    "full copy": masters(adamw),
    "split 16": masters(adamw, storage=optax_mp.Split(16)),
    "split 8": masters(adamw, storage=optax_mp.Split(8)),
    "low-bit 8": masters(low_bit(adamw)),
    "low-bit 16": masters(low_bit(adamw, bits=16)),
    "5.1 bytes": masters(low_bit(adamw), storage=optax_mp.Split(8)),
    "stochastic": optax_mp.stochastic_rounding(low_bit(adamw)),
    "multi steps": masters(optax.MultiSteps(adamw, 3).gradient_transformation()),
    "partition": optax.partition(
        {"trained": masters(adamw), "frozen": optax.set_to_zero()}, LABELS
    ),
    "masked": optax.masked(
        masters(adamw), {name: label == "trained" for name, label in LABELS.items()}
    ),
    "chain": optax.chain(
        optax.clip(1.0), masters(optax.inject_hyperparams(optax.adamw)(1e-2))
    ),
    "chance": masters(optax.chain(CHANCE, adamw)),
    "float16": masters(adamw, storage=optax_mp.Split(16)),
    "float8": masters(adamw, update_dtype="params"),
}
UNSCALED["average"] = optax_mp.with_average(UNSCALED["5.1 bytes"], 0.5)
SCALED = {
    f"scaled {name}": optax_mp.dynamic_loss_scale(tx, init_scale=8.0, growth_interval=3)
    for name, tx in UNSCALED.items()
}
FORMS = UNSCALED | SCALED
_DTYPES = {"float16": jnp.float16, "float8": jnp.float8_e4m3fn, "bare": jnp.float32}


def params_of(name):
    """Return the params where the run of that name starts."""
    dtype = _DTYPES.get(name.removeprefix("scaled "), jnp.bfloat16)
    rng = np.random.default_rng(100)
    weights = jnp.asarray(rng.standard_normal((16, 32), np.float32))
    return {
        "w": weights.astype(dtype),
        "norm": jnp.ones(3),
        "frozen": weights[:2].astype(dtype),
    }


def start_of(name):
    params = params_of(name)
    return params, jax.jit(FORMS[name].init)(params)


def template_of(name, shardings_of=None):
    """Return what to restore a run into: shapes and dtypes, and where they are to be.

    Orbax wants shardings; those in a checkpoint are of the devices that it was made on.
    """
    params = params_of(name)
    shapes = jax.eval_shape(lambda p: (p, FORMS[name].init(p)), params)
    if shardings_of is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    else:
        shardings = shardings_of(shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings,
    )


def gradients(step, scale=1.0):
    """Return float32 gradients that depend only on the step; every fourth is bad."""
    rng = np.random.default_rng(step)
    grads = {
        "w": rng.standard_normal((16, 32), np.float32) * scale,
        "norm": rng.standard_normal(3, np.float32) * scale,
        "frozen": rng.standard_normal((2, 32), np.float32) * scale,
    }
    if scale != 1 and step % 4 == 1:
        grads["norm"][1] = np.inf
    return grads


@functools.cache
def step_of(name):
    return jax.jit(by_update(FORMS[name]))


def train(name, params, opt_state, steps):
    for i in steps:
        scale = opt_state.scale if name in SCALED else 1.0
        grads = gradients(i, np.float32(scale))
        params, opt_state = step_of(name)(params, opt_state, grads)
    return params, opt_state
