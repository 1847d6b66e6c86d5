"""Leaves with more elements along one axis than an int32 counts."""

import jax
import jax.numpy as jnp
import optax

import optax_mp


def test_no_chunk_starts_where_an_int32_overflows():
    """Without chunks, whose starts are int32: they would overlap, silently."""
    inner = optax_mp.low_bit_state(optax.adam(1e-3))
    tx = optax_mp.mixed_precision(inner, storage=optax_mp.Split(8))
    step = jax.jit(lambda *args: optax_mp.take_step(tx, *args))
    slices = []
    for size in (2**25, 2**31 + 2**20):
        params = {"w": jax.ShapeDtypeStruct((size,), jnp.bfloat16)}
        traced = step.trace(params, tx.init(params), params)
        program = traced.lower(lowering_platforms=("tpu",)).as_text()
        slices.append(program.count("dynamic_slice"))
    assert slices[0] > 0
    assert slices[1] == 0
