"""A toy format of 4 bits: nothing outside of `compact/` has to know it."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp
from optax_mp.compact import _low_bit
from optax_mp.compact._code_choice import CodeFormat

SHAPE = (1024, 512)


@pytest.fixture(scope="module")
def compact():
    """Return masters in 8 bits more, and moments in 4."""
    toy = CodeFormat(4, 16, 32)
    settings = types.SimpleNamespace(from_settings=lambda *_: toy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_low_bit, "CodeFormat", settings)
        low = optax_mp.low_bit_state(optax.adamw(1e-2), min_size=1)
        yield optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def take_two_steps(tx):
    rng = np.random.default_rng(0)
    draw = lambda: {"w": jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16)}  # noqa: E731
    start = params = draw()
    state = jax.jit(tx.init)(params)
    step = jax.jit(functools.partial(optax_mp.take_step, tx))
    for _ in range(2):
        params, state = step(draw(), state, params)
    return np.asarray((params["w"] - start["w"]).astype(float)).ravel(), state


def test_codes_have_four_bits_and_train(compact):
    moved, state = take_two_steps(compact)
    adam = state.inner_state.inner_state[0]
    assert adam.mu["w"].codes.dtype == jnp.int4
    assert adam.nu["w"].codes.dtype == jnp.uint4
    want, _ = take_two_steps(optax_mp.mixed_precision(optax.adamw(1e-2)))
    assert np.corrcoef(moved, want)[0, 1] > 0.9


def test_a_report_counts_half_a_byte(compact):
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    report = optax_mp.memory_report(jax.eval_shape(compact.init, params), params)
    # Params, what they lack, two moments, for 32 of each a scale of 16 bits, and for 128
    # a shift.
    want = 2 + 1 + 2 * (0.5 + 2 / 32 + 1 / 128)
    assert report.bytes_per_weight == pytest.approx(want, abs=1e-4)


def test_kernels_refuse_it_and_say_so(compact):
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    (row,) = optax_mp.step_report(compact, params, compact.init(params), params).rows
    assert {row.tpu, row.gpu} <= {"computes in int4", "computes in uint4"}
