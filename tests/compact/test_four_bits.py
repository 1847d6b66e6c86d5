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


@pytest.fixture(scope="module")
def after_two(compact):
    """Return params and state after two steps on one device, and the step."""
    return take_steps(compact, 2)


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16)}


def take_steps(tx, count, params=None, state=None, sharding=None):
    params = arrays(0) if params is None else params
    state = jax.jit(tx.init)(params) if state is None else state
    step = jax.jit(functools.partial(optax_mp.take_step, tx))
    for i in range(count):
        grads = jax.device_put(arrays(i + 1), sharding)
        params, state = step(grads, state, params)
    return params, state, step


def test_codes_have_four_bits_and_train(after_two):
    params, state, _ = after_two
    adam = state.inner_state.inner_state[0]
    assert adam.mu["w"].codes.dtype == jnp.int4
    assert adam.nu["w"].codes.dtype == jnp.uint4
    want, *_ = take_steps(optax_mp.mixed_precision(optax.adamw(1e-2)), 2)
    start, *ends = (np.asarray(x["w"], float) for x in (arrays(0), params, want))
    assert np.corrcoef(*((x - start).ravel() for x in ends))[0, 1] > 0.9


def test_a_report_counts_half_a_byte(compact):
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    report = optax_mp.memory_report(jax.eval_shape(compact.init, params), params)
    # Params, what they lack, two moments, for 32 of each a scale of 16 bits, and for 128
    # a shift.
    want = 2 + 1 + 2 * (0.5 + 2 / 32 + 1 / 128)
    assert report.bytes_per_weight == pytest.approx(want, abs=1e-4)


def test_kernels_refuse_it_and_say_so(compact):
    params = arrays(0)
    (row,) = optax_mp.step_report(compact, params, compact.init(params), params).rows
    assert {row.tpu, row.gpu} <= {"computes in int4", "computes in uint4"}
