"""A toy format of 4 bits: nothing outside of `compact/` has to know it."""

import functools
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from communication import sent_by
from comparison import as_bits, check_alike
from jax.sharding import NamedSharding, PartitionSpec

import optax_mp
from optax_mp.compact import _low_bit
from optax_mp.compact._code_choice import CodeFormat
from optax_mp.engine import _by_platform, _chunks

SHAPE = (1024, 512)
KINDS = (jax.sharding.AxisType.Auto,)
ROWS = NamedSharding(jax.make_mesh((8,), ("i",), axis_types=KINDS), PartitionSpec("i"))


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


def test_chunks_take_it(compact, after_two, monkeypatch):
    monkeypatch.setattr(_chunks, "COUNT", 2**16)
    target = _by_platform.Target("tpu")
    monkeypatch.setattr(_by_platform.Target, "of", lambda _: target)
    jax.clear_caches()
    *got, step = take_steps(compact, 2)
    assert "stablehlo.while" in step.lower(arrays(1), got[1], got[0]).as_text()
    check_alike(got, after_two[:2])


def test_it_is_sharded_like_its_params(compact, after_two):
    params = jax.device_put(arrays(0), ROWS)
    placed = optax_mp.state_shardings(compact, params)
    state = jax.jit(compact.init, out_shardings=placed)(params)
    params, state, step = take_steps(compact, 2, params, state, ROWS)
    for x in jax.tree.leaves(state):
        assert not x.ndim or x.sharding.is_equivalent_to(ROWS, x.ndim)
    compiled = step.lower(jax.device_put(arrays(1), ROWS), state, params).compile()
    assert not sent_by(compiled)
    assert as_bits(params) == as_bits(after_two[0])


def test_a_checkpoint_holds_it(compact, after_two):
    params, state, step = after_two
    leaves, treedef = jax.tree.flatten(state)
    file = io.BytesIO()
    np.savez(file, *(np.asarray(x).view(np.uint8) if x.ndim else x for x in leaves))
    file.seek(0)
    saved = np.load(file).values()
    saved = [
        np.asarray(x).view(leaf.dtype) if leaf.ndim else x
        for x, leaf in zip(saved, leaves, strict=True)
    ]
    restored = treedef.unflatten(saved)
    optax_mp.check_checkpoint(restored, jax.eval_shape(compact.init, params))
    want, got = (step(arrays(3), x, params) for x in (state, restored))
    assert as_bits(got) == as_bits(want)
    exact = optax_mp.mixed_precision(optax.adamw(1e-2))
    wide = optax_mp.convert_opt_state(state, params, compact, exact)
    assert wide.inner_state[0].mu["w"].dtype == jnp.float32
