"""How many functions of the package a compact step goes through until it is lowered."""

import importlib

import jax
import jax.numpy as jnp
import optax
from benchmark_rows import FOLDERS

import optax_mp


def test_a_compact_step_is_lowered_through_few_functions(monkeypatch):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    walk = importlib.import_module("walk")
    low = optax_mp.low_bit_state(optax.adamw(1e-3))
    tx = optax_mp.mixed_precision(low, storage=optax_mp.Split(8))
    params = {name: jnp.ones((256, 256), jnp.bfloat16) for name in ("a", "b")}
    state = tx.init(params)

    def lower():
        step = jax.jit(lambda *args: optax_mp.take_step(tx, *args))
        traced = step.trace(params, state, params)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "tpu_custom_call" in text

    lower()  # JAX's own caches are filled
    counts = walk.calls_of(lower)
    assert 0 < counts.total() <= 10_000
    assert len({file for file, _ in counts if "optax_mp" in file}) <= 33
