"""Checkpoints: files that keep every bit, and runs that go on."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from slow_cases import mostly_slow
from steps import take_steps
from trained_forms import gradients, start_of, train

import optax_mp

adamw = optax.adamw(1e-2)


# Files of other kinds.


def goes_on(name, run, restored):
    assert as_bits(restored) == as_bits(run)
    assert jax.tree.structure(restored) == jax.tree.structure(run)
    found = train(name, *restored, range(4, 6))
    assert as_bits(found) == as_bits(train(name, *run, range(4, 6)))


@mostly_slow(
    "name", ["scaled 5.1 bytes", "partition", "float8"], {"float8"}.__contains__
)
def test_pickle_and_msgpack_of_flax_keep_every_bit(name):
    serialization = pytest.importorskip("flax.serialization")
    run = train(name, *start_of(name), range(4))
    restored = pickle.loads(pickle.dumps(jax.device_get(run)))
    goes_on(name, run, restored)
    saved = serialization.to_bytes(run)
    empty = jax.tree.map(jnp.zeros_like, run)
    goes_on(name, run, serialization.from_bytes(empty, saved))


# Runs that were something else before.


def random_weights():
    rng = np.random.default_rng(7)
    return {
        "w": rng.standard_normal((16, 32), np.float32),
        "norm": rng.standard_normal(3, np.float32),
    }


def grads_of(step):
    grads = gradients(step)
    return {"w": grads["w"], "norm": grads["norm"]}


def steps_of(tx, params, state, steps):
    return take_steps(tx, params, state, map(grads_of, steps))


@pytest.mark.parametrize("storage", [optax_mp.FullCopy(), optax_mp.Split(16)], ids=str)
def test_masters_hold_every_bit_of_a_float32_checkpoint(storage, tmp_path):
    np.savez(tmp_path / "weights.npz", **random_weights())
    with np.load(tmp_path / "weights.npz") as file:
        weights = {name: file[name] for name in file.files}
    policy = optax_mp.get_policy("p=bf16", keep_f32=("norm",))
    tx = optax_mp.mixed_precision(adamw, param_dtype=policy, storage=storage)
    state, params = tx.init(weights), policy.cast_to_param(weights)
    assert as_bits(optax_mp.master_params(state, params)) == as_bits(random_weights())
    # And so it trains as the float32 run that starts from the same file.
    params, state = steps_of(tx, params, state, range(5))
    wanted, _ = steps_of(adamw, weights, adamw.init(weights), range(5))
    assert as_bits(optax_mp.master_params(state, params)) == as_bits(wanted)
