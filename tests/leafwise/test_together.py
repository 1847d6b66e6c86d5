"""Small leaves that are alike take their step together on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import check_alike
from slow_cases import mostly_slow

import optax_mp
from optax_mp._jax._apart import can_call_apart
from optax_mp.leafwise import _together

stacks = pytest.mark.skipif(not can_call_apart(), reason="before JAX 0.7")


def compact(inner=None, storage=None, **settings):
    low = optax_mp.low_bit_state(inner or optax.adamw(1e-2), min_size=1, **settings)
    return optax_mp.mixed_precision(low, storage=storage or optax_mp.Split(8))


FORMS = {
    "5.1 bytes": compact,
    "16 bits": lambda: compact(storage=optax_mp.Split(16), bits=16),
    "loss scale": lambda: optax_mp.dynamic_loss_scale(compact()),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), compact()),
    "stochastic rounding": lambda: optax_mp.stochastic_rounding(
        optax_mp.low_bit_state(optax.adamw(1e-2), min_size=1)
    ),
    "float16": compact,
    "one by one": lambda: compact(optax.lamb(1e-2)),
    # Some of its ends read nothing.
    "constants": lambda: compact(optax.adafactor(1e-2)),
}
# Vectors, scalars and empty ones, and one that is like no other.
SHAPES = [(16, 96)] * 9 + [(33,)] * 3 + [()] * 3 + [(0, 4)] * 3 + [(2, 3, 40)]


def tree(seed, dtype, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {
        f"p{i:02}": jnp.asarray(rng.normal(size=shape), dtype)
        for i, shape in enumerate(shapes)
    }


def by_update(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def compiled_step(way, tx, grads, state, params):
    return jax.jit(functools.partial(way, tx)).lower(grads, state, params).compile()


def trained(way, tx, dtype, steps=3):
    params = tree(0, dtype)
    carry = params, tx.init(params)
    step = compiled_step(way, tx, params, *carry[::-1])
    for i in range(steps):
        params, state = carry
        carry = step(tree(i + 1, dtype), state, params)
    return carry, step.as_text()


@stacks
@mostly_slow(
    "form", FORMS, lambda form: form in ("5.1 bytes", "one by one", "constants")
)
@pytest.mark.parametrize("way", [optax_mp.take_step, by_update])
def test_stacks_change_nothing(way, form, monkeypatch):
    tx = FORMS[form]()
    dtype = "float16" if form == "float16" else "bfloat16"
    monkeypatch.setattr(_together, "_MOST_LEAVES", 4)
    got, text = trained(way, tx, dtype)
    assert " call(" in text
    monkeypatch.setattr(_together, "can_call_apart", lambda: False)
    want, text = trained(way, tx, dtype)
    assert " call(" not in text
    # What is left of a master is its last places.
    check_alike(got, want, codes=5e-3, wider=6e-2)


@stacks
def test_what_is_compiled_and_needed_grows_with_stacks_and_not_with_leaves():
    tx, counts = compact(), {}
    for leaves in (64, 128):
        params = tree(0, "bfloat16", [(64, 64)] * leaves)
        state = jax.eval_shape(tx.init, params)
        step = compiled_step(optax_mp.take_step, tx, params, state, params)
        counts[leaves] = len(step.as_text().splitlines())
        needed = step.memory_analysis().temp_size_in_bytes
        # One stack of 2^16 weights, whatever the number of leaves.
        assert needed <= 12 * 2**16
    assert (counts[128] - counts[64]) / 64 <= 200  # 700 without stacks


@stacks
def test_large_leaves_and_other_platforms_have_no_stacks():
    tx = compact()
    for shapes in ([(128, 128)] * 9, [(64, 64)]):
        params = tree(0, "bfloat16", shapes)
        step = compiled_step(optax_mp.take_step, tx, params, tx.init(params), params)
        assert " concatenate(" not in step.as_text()
    params = tree(0, "bfloat16", [(64, 64)] * 9)
    traced = jax.jit(functools.partial(optax_mp.take_step, tx)).trace(
        params, tx.init(params), params
    )
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu")
    }
    assert "inlineable" in texts["cpu"]
    assert "inlineable" not in texts["tpu"]


@stacks
def test_many_models_at_a_time_are_the_same():
    tx = compact()

    def models(seed):
        return jax.tree.map(
            lambda *xs: jnp.stack(xs), *(tree(seed + i, "bfloat16") for i in range(2))
        )

    params, grads = models(0), models(2)
    state = jax.vmap(tx.init)(params)
    step = jax.jit(functools.partial(optax_mp.take_step, tx))
    got = jax.jit(jax.vmap(step))(grads, state, params)
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], (grads, state, params))
        want = step(*one)
        check_alike(jax.tree.map(lambda x, i=i: x[i], got), want)


def test_leaked_tracers_are_looked_for():
    tx, params = compact(optax.sgd(0.1, 0.9)), tree(0, "bfloat16", [(8, 32)])
    for way in (optax_mp.take_step, by_update):
        with jax.checking_leaks():
            jax.jit(functools.partial(way, tx))(params, tx.init(params), params)
