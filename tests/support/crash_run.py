"""A training run that may be killed at any moment and started again; a script.

It goes on from the last whole checkpoint in the directory that it is given, prints
where it is, and leaves its last state in a file.
"""

import pathlib
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp

ocp = pytest.importorskip("orbax.checkpoint")

SAVE_EVERY = 10
FINAL = "final.pickle"
# The parent reads a step and kills this process within the next ten steps.
PAUSE = 0.003
WIDTH = 8

masters = optax_mp.mixed_precision(optax.adamw(optax.linear_schedule(1e-2, 1e-3, 500)))
tx = optax_mp.dynamic_loss_scale(masters, growth_interval=7)


def is_bad(step):
    """Return whether the gradients of a step are infinite, so that it is skipped."""
    return step % 11 == 4


def batch(step):
    x = np.random.default_rng(step).standard_normal((4, WIDTH), np.float32)
    x[0, 0] = np.inf if is_bad(step) else x[0, 0]
    return jnp.bfloat16(x)


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) * params["scale"] - x) ** 2)


def start():
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH), jnp.bfloat16)
    params = {"w": w, "scale": jnp.ones(WIDTH, jnp.bfloat16)}
    return params, tx.init(params)


@jax.jit
def train_step(params, opt_state, x):
    _, grads = optax_mp.value_and_grad(loss)(opt_state, params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def restored(manager, step):
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start()
    )
    return manager.restore(step, args=ocp.args.StandardRestore(template))


def main(directory, steps):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=True
    )
    # A new manager needs a handler to describe the checkpoints that it finds.
    handler = ocp.StandardCheckpointHandler()
    folder = directory / "checkpoints"
    with ocp.CheckpointManager(
        folder, options=options, item_handlers=handler
    ) as manager:
        step = manager.latest_step() or 0
        run = restored(manager, step) if step else start()
        print("resumed", step, flush=True)
        while step < steps:
            run = train_step(*run, batch(step))
            step += 1
            print("step", step, flush=True)
            if step % SAVE_EVERY == 0:
                print("saving", step, flush=True)
                manager.save(step, args=ocp.args.StandardSave(run))
            time.sleep(PAUSE)
    (directory / FINAL).write_bytes(pickle.dumps(jax.device_get(run)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
