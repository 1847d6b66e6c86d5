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

SHAPE = (2048, 512)
KINDS = (jax.sharding.AxisType.Auto,)
ROWS = NamedSharding(jax.make_mesh((8,), ("i",), axis_types=KINDS), PartitionSpec("i"))


@pytest.fixture
def compact(monkeypatch):
    """Return masters in 8 bits more, and moments in 4."""
    toy = CodeFormat(4, 16, 32)
    settings = types.SimpleNamespace(from_settings=lambda *_: toy)
    monkeypatch.setattr(_low_bit, "CodeFormat", settings)
    low = optax_mp.low_bit_state(optax.adamw(1e-2), min_size=1)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16)}


def take_steps(tx, count, params=None, state=None, sharding=None):
    params = arrays(0) if params is None else params
    state = tx.init(params) if state is None else state
    step = jax.jit(functools.partial(optax_mp.take_step, tx))
    for i in range(count):
        grads = jax.device_put(arrays(i + 1), sharding)
        params, state = step(grads, state, params)
    return params, state, step


def test_codes_have_four_bits_and_train(compact):
    params, state, _ = take_steps(compact, 3)
    adam = state.inner_state.inner_state[0]
    assert (
        adam.mu["w"].codes.dtype == jnp.int4 and adam.nu["w"].codes.dtype == jnp.uint4
    )
    exact = optax_mp.mixed_precision(optax.adamw(1e-2))
    want, *_ = take_steps(exact, 3)
    moved, moved_exactly = (
        x["w"].astype(jnp.float32) - arrays(0)["w"] for x in (params, want)
    )
    assert jnp.corrcoef(moved.ravel(), moved_exactly.ravel())[0, 1] > 0.9


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


def test_chunks_take_it(compact, monkeypatch):
    want = take_steps(compact, 2)[:2]
    monkeypatch.setattr(_chunks, "COUNT", 2**17)
    target = _by_platform.Target("tpu")
    monkeypatch.setattr(_by_platform.Target, "of", lambda _: target)
    jax.clear_caches()
    *got, step = take_steps(compact, 2)
    assert "stablehlo.while" in step.lower(arrays(1), got[1], got[0]).as_text()
    check_alike(got, want)


def test_it_is_sharded_like_its_params(compact):
    params = jax.device_put(arrays(0), ROWS)
    placed = optax_mp.state_shardings(compact, params)
    state = jax.jit(compact.init, out_shardings=placed)(params)
    params, state, step = take_steps(compact, 2, params, state, ROWS)
    for x in jax.tree.leaves(state):
        assert not x.ndim or x.sharding.is_equivalent_to(ROWS, x.ndim)
    compiled = step.lower(jax.device_put(arrays(1), ROWS), state, params).compile()
    assert not sent_by(compiled)
    assert as_bits(params) == as_bits(take_steps(compact, 2)[0])


def test_a_checkpoint_holds_it(compact):
    params, state, _ = take_steps(compact, 1)
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
    want, got = (take_steps(compact, 1, params, x)[0] for x in (state, restored))
    assert as_bits(got) == as_bits(want)
    exact = optax_mp.mixed_precision(optax.adamw(1e-2))
    wide = optax_mp.convert_opt_state(state, params, compact, exact)
    assert wide.inner_state[0].mu["w"].dtype == jnp.float32
