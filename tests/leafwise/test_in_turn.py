"""Large leaves take their step in turn on a CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, check_alike
from slow_cases import mostly_slow

import optax_mp
from optax_mp._jax import _order
from optax_mp._jax._apart import can_call_apart

turns = pytest.mark.skipif(not can_call_apart(), reason="before JAX 0.7")


def split(bits):
    return optax_mp.mixed_precision(optax.adamw(1e-2), storage=optax_mp.Split(bits))


def low(inner=None, **settings):
    return optax_mp.low_bit_state(inner or optax.adamw(1e-2), min_size=1, **settings)


def compact(inner=None, **settings):
    storage = optax_mp.Split(8)
    return optax_mp.mixed_precision(low(inner, **settings), storage=storage)


FORMS = {
    "split": lambda: split(16),
    "float16": lambda: split(8),
    "5.1 bytes": compact,
    "momentum": lambda: compact(optax.sgd(1e-2, 0.9)),
    "16 bits": lambda: low(bits=16),
    "full copies": lambda: optax_mp.mixed_precision(low()),
    "stochastic rounding": lambda: optax_mp.stochastic_rounding(low()),
    "loss scale": lambda: optax_mp.dynamic_loss_scale(compact()),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), compact()),
    "one by one": lambda: compact(optax.lamb(1e-2)),
}
# More elements than may be under way, leaves of other ranks, and small and empty ones.
SHAPES = [(192, 640)] * 4 + [(3, 80, 130), (2**17,), (8, 32), (), (0, 4)]


def tree(seed, dtype, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def by_update(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def compiled_step(way, tx, dtype, shapes=SHAPES):
    params = tree(0, dtype, shapes)
    args = params, jax.eval_shape(tx.init, params), params
    step = jax.jit(functools.partial(way, tx), donate_argnums=(1, 2))
    return step.lower(*args).compile()


def trained(step, tx, dtype):
    params = tree(0, dtype)
    state = jax.jit(tx.init)(params)
    for i in range(3):
        params, state = step(tree(i + 1, dtype), state, params)
    return params, state


def needed(step):
    return step.memory_analysis().temp_size_in_bytes


@turns
@mostly_slow("form", FORMS, lambda form: form in ("split", "5.1 bytes"))
@pytest.mark.parametrize("way", [optax_mp.take_step, by_update])
def test_turns_change_last_places_at_most(way, form, monkeypatch):
    tx, dtype = FORMS[form](), "float16" if form == "float16" else "bfloat16"
    in_turn = compiled_step(way, tx, dtype)
    monkeypatch.setattr(_order, "can_call_apart", lambda: False)
    at_once = compiled_step(way, tx, dtype)
    assert needed(in_turn) <= needed(at_once)
    got, want = (trained(step, tx, dtype) for step in (in_turn, at_once))
    # A master of which only some places are kept shows the last of them.
    check_alike(got, want, codes=5e-3)
    if form in ("split", "float16"):
        assert as_bits(got) == as_bits(want)


@turns
@pytest.mark.parametrize("way", [optax_mp.take_step, by_update])
def test_turns_know_64_bit_types(way, x64):
    tx, params = low(), tree(0, "float32", [(128, 96)] * 2)
    args = params, tx.init(params), params
    got = jax.jit(functools.partial(way, tx))(*args)
    check_alike(got, way(tx, *args))


@turns
@pytest.mark.parametrize("way", [optax_mp.take_step, by_update])
@pytest.mark.parametrize("form", ["split", "5.1 bytes", "full copies"])
def test_what_is_needed_does_not_grow_with_leaves(way, form):
    tx = FORMS[form]()
    few, many = (
        needed(compiled_step(way, tx, "bfloat16", [(256, 512)] * count))
        for count in (6, 12)
    )
    # Numbers as small as one for each block.
    assert many - few <= 0.5 * 6 * 256 * 512
    # Of those under way, and of one more.
    assert few <= 8 * (2**18 + 256 * 512)


@turns
@pytest.mark.parametrize(
    "form", ["split", "float16", "5.1 bytes", "stochastic rounding"]
)
def test_no_code_or_param_is_copied(form):
    dtype = "float16" if form == "float16" else "bfloat16"
    text = compiled_step(optax_mp.take_step, FORMS[form](), dtype).as_text()
    assert not re.findall(r"= \w+\[192,640\]\S* copy\(", text)


@turns
def test_no_other_program_has_turns():
    tx = compact()
    params = tree(0, "bfloat16")
    args = params, jax.eval_shape(tx.init, params), params
    step = jax.jit(functools.partial(optax_mp.take_step, tx))
    traced = step.trace(*args)
    assert "inlineable" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "inlineable" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    small = compiled_step(optax_mp.take_step, tx, "bfloat16", [(64, 128), (8, 32)])
    assert " call(" not in small.as_text()
    plain = compiled_step(optax_mp.take_step, optax.adamw(1e-2), "bfloat16")
    assert " call(" not in plain.as_text()
