"""Checkpoints: files that keep every bit, and runs that go on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from form_runs import check_bits, scaled_gradients
from forms import named, params_of
from slow_cases import mostly_slow
from steps import by_update, take_steps

import optax_mp

adamw = optax.adamw(1e-2)


@mostly_slow(
    "form",
    named("float8", "scaled, 5 bytes", "link, groups"),
    lambda form: form.name == "float8",
    ids=str,
)
def test_msgpack_of_flax_keeps_every_bit(form):
    """Of the nodes that Flax knows; tests/properties pickles all forms."""
    serialization = pytest.importorskip("flax.serialization")
    known = lambda tree: {k: v for k, v in tree.items() if k != "box"}  # noqa: E731
    params, step = known(params_of(form)), jax.jit(by_update(form.tx))
    run = params, jax.jit(form.tx.init)(params)
    first, second = (known(scaled_gradients(form, run[1], i)) for i in range(2))
    run = step(*run, first)
    empty = jax.tree.map(jnp.zeros_like, run)
    restored = serialization.from_bytes(empty, serialization.to_bytes(run))
    assert jax.tree.structure(restored) == jax.tree.structure(run)
    check_bits(form, "restored", restored, run)
    check_bits(form, "the next step", step(*restored, second), step(*run, second))


# Runs that were something else before.


def random_weights():
    rng = np.random.default_rng(7)
    return {
        "w": rng.standard_normal((16, 32), np.float32),
        "norm": rng.standard_normal(3, np.float32),
    }


def grads_of(step):
    rng = np.random.default_rng(step)
    shapes = {name: x.shape for name, x in random_weights().items()}
    return {k: rng.standard_normal(s, np.float32) for k, s in shapes.items()}


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
