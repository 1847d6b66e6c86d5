"""step_report: it says kernel where the compiled step has one, and why not elsewhere."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_mp

KERNEL = "kernel, not proved here"  # no TPU and no GPU is here
has_kernels = pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="before JAX 0.6")


def compact(**settings):
    low = optax_mp.low_bit_state(optax.adamw(0.1), **settings)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def reported(tx, *shapes, dtype="bfloat16", **settings):
    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    opt_state = jax.eval_shape(tx.init, params)
    rows = optax_mp.step_report(tx, params, opt_state, params, **settings).rows
    return [(row.tpu, row.gpu) for row in rows]


@has_kernels
def test_each_reason_is_named():
    shapes = (256, 128), (8192,), (8, 8), (64, 200), (64, 201), (1023, 4, 40)
    rows = "last axis not a multiple of 128"
    assert reported(compact(min_size=1), *shapes) == [
        (KERNEL, KERNEL),
        ("1-D array", KERNEL),
        ("under 4096 elements", "under 4096 elements"),
        (rows, KERNEL),
        (rows, "last axis not a multiple of 32"),
        (rows, KERNEL),
    ]
    for size, gpu in ((256, KERNEL), (8192, "blocks of 8192 and groups of 4")):
        reasons = reported(compact(block_size=size), (4, 8 * size))
        assert reasons == [(f"blocks of {size}", gpu)]
    assert reported(compact(), (64, 128), dtype="float16")[0][0] == (
        "computes in float16"
    )
    both = "no low-bit arrays"
    assert reported(optax.adamw(0.1), (64, 128)) == [(both, both)]


def test_an_update_with_effects_is_named():
    def update(grads, state, params=None):
        jax.debug.print("{}", 1)
        return grads, state

    printing = optax.GradientTransformation(lambda params: (), update)
    tx = optax_mp.mixed_precision(printing, storage=optax_mp.Split(8))
    assert reported(tx, (64, 128)) == [("the update has effects",) * 2]


@has_kernels
def test_a_setting_is_named(monkeypatch):
    monkeypatch.setenv("OPTAX_MP_KERNELS", "0")
    assert reported(compact(), (64, 128)) == [("OPTAX_MP_KERNELS=0",) * 2]


@has_kernels
def test_a_report_says_what_is_lowered():
    tx = compact(min_size=1)
    for shape in ((256, 128), (64, 128), (8192,), (8, 8)):
        [(tpu, _)] = reported(tx, shape)
        params = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)]
        step = functools.partial(optax_mp.take_step, tx)
        traced = jax.jit(step).trace(params, jax.eval_shape(tx.init, params), params)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert (tpu == KERNEL) == ("tpu_custom_call" in text)


def test_leaves_of_one_kind_share_a_line():
    params = [jnp.ones((4, 4))] * 3
    tx = optax.sgd(0.1)
    text = str(optax_mp.step_report(tx, params, tx.init(params), params))
    assert "[0] and 2 more" in text
    assert len(text.splitlines()) == 2
