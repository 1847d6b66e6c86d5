"""Makes the checkpoints of the first edition that the tests read.

Run it with a checkout of the first edition (commit 982ca47) on the path, on the oldest
JAX, whose pickles later releases read::

    PYTHONPATH=first_edition_checkout:tests/support python make.py DIRECTORY

It writes a file for each form of a run, and one with values of every class that may be
in a pickle. A file holds nothing but builtins and NumPy arrays: pickles made by the
first edition are bytes in it.
"""

import pickle
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp

# The tests import this file too, also where these are not installed.
serialization = pytest.importorskip("flax.serialization")
ocp = pytest.importorskip("orbax.checkpoint")

STEPS_BEFORE = (False, False, True, True, True)  # finite or not
STEPS_AFTER = (True, False, True, True)


def forms():
    """Return the transformation of each run."""
    adamw = optax.adamw(1e-2, weight_decay=0.1)
    low_bit = optax_mp.low_bit_state(adamw, min_size=64)
    masters = optax_mp.mixed_precision
    bare = {
        "full_copy": masters(adamw),
        "split_16": masters(adamw, storage=optax_mp.Split(16)),
        "split_8_and_8_bits": masters(low_bit, storage=optax_mp.Split(8)),
        "stochastic_rounding": optax_mp.stochastic_rounding(adamw, seed=3),
    }
    return {
        name: optax_mp.dynamic_loss_scale(tx, hysteresis=2) for name, tx in bare.items()
    }


def start():
    """Return the params: one leaf is its own master."""
    return {
        "w": jnp.asarray(sixty_fourths(16, 16), jnp.bfloat16),
        "norm": jnp.asarray(sixty_fourths(4) + 1, jnp.float32),
    }


def sixty_fourths(*shape, step=0):
    """Return numbers that every platform makes alike."""
    numbers = np.arange(np.prod(shape)) * 37 + step * 11 + 5
    return (numbers % 101 - 50).reshape(shape).astype(np.float32) / 64


def train(tx, params, state, steps, first_step=0):
    """Return params and state after steps that are finite or not."""
    update = jax.jit(tx.update)
    for step, is_finite in enumerate(steps, first_step):
        scale, overflow = optax_mp.loss_scale(state), 0 if is_finite else jnp.inf
        grads = {
            name: jnp.asarray(sixty_fourths(*leaf.shape, step=step)) * scale + overflow
            for name, leaf in params.items()
        }
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def without_template(params_and_state):
    """Return what Orbax restores where it is given no template."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        checkpointer = ocp.StandardCheckpointer()
        checkpointer.save(path, params_and_state)
        checkpointer.wait_until_finished()
        restored = ocp.PyTreeCheckpointer().restore(path)
    return jax.tree.map(np.asarray, restored)


def checkpoint(tx):
    """Return a run's checkpoint in three forms, and how the run went on."""
    params, state = train(tx, start(), tx.init(start()), STEPS_BEFORE)
    saved = {"params": params, "opt_state": state}
    later = train(tx, params, state, STEPS_AFTER, len(STEPS_BEFORE))
    return {
        "pickle": pickle.dumps((params, state)),
        "msgpack": serialization.to_bytes(saved),
        "orbax": without_template(saved),
        "later": jax.tree.map(np.asarray, jax.tree.leaves(later)),
    }


def values():
    """Return something of every public class whose objects may be saved."""
    params = start()
    state = forms()["split_8_and_8_bits"].init(params)
    return {
        "Policy": optax_mp.get_policy("params=bfloat16,compute=bfloat16"),
        "FullCopy": optax_mp.FullCopy(),
        "Split": optax_mp.Split(8),
        "NoOpLossScale": optax_mp.NoOpLossScale(),
        "StaticLossScale": optax_mp.StaticLossScale(8.0),
        "DynamicLossScale": optax_mp.DynamicLossScale(2.0**10, min_loss_scale=0.5),
        "MemoryReport": optax_mp.memory_report(params, state),
        "GradientRangeReport": optax_mp.gradient_range_report(params),
        "FormatRange": optax_mp.gradient_range_report(params).in_format("float16"),
    }


def main(folder):
    """Write all files."""
    for name, tx in forms().items():
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(checkpoint(tx)))
    saved = {name: pickle.dumps(value) for name, value in values().items()}
    (folder / "values.pickle").write_bytes(pickle.dumps(saved))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
