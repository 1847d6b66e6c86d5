"""Every optimizer of optax, times every promise: the masters move as bare optax does."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from optimizers import (
    DISTINCT,
    OPTIMIZERS,
    example_gradients,
    example_params,
    extra_arguments,
)
from reference import follow, rounded, settle, smallest_landing
from slow_cases import mostly_slow

import optax_mp

STEPS = 50
# A master is put together, or compared with its param, within the program of the rule.
# There XLA contracts a multiplication and an addition of these otherwise: a unit in the
# last place a step.
CONTRACTED = ("madgrad", "schedule_free", "schedule_free_adamw", "schedule_free_sgd")
# By default one in bfloat16 and in float16; in CI all in bfloat16. What else is
# promised of every optimizer is tried by default with one or two.
IN_LOW_DTYPES = [
    (name, dtype)
    for name in OPTIMIZERS
    for dtype in ("bfloat16", "float16", "float8_e4m3fn")
    if dtype == "bfloat16" or name in DISTINCT
]
FULL_COPY, SPLIT_16 = optax_mp.FullCopy(), optax_mp.Split(bits=16)


def step_function(name, tx):
    tx = optax.with_extra_args_support(tx)

    def step(carry, grads):
        params, state = carry
        extra = extra_arguments(name, grads)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def masters_of(carry):
    params, state = carry
    is_ours = isinstance(state, optax_mp.MixedPrecisionState)
    return optax_mp.master_params(state, params) if is_ours else params


def settled(carry, before, storage):
    """Return (params, carry) after a step of a bare optimizer, as `storage` has them.

    Bare optax on weights that are rounded after each step to what `storage` keeps.
    """
    if storage == FULL_COPY:
        return before, carry
    pairs = jax.tree.map(
        lambda master, param: settle(
            np.asarray(master), np.asarray(param), storage.bits
        ),
        carry[0],
        before,
    )
    low, masters = jax.tree.transpose(
        jax.tree.structure(before), jax.tree.structure((0, 0)), pairs
    )
    # NumPy makes scalars of arrays without axes, which not every rule takes.
    return low, (jax.tree.map(jnp.asarray, masters), carry[1])


def trajectory(name, tx, params, grads, low=None, storage=FULL_COPY):
    """Return (masters at every step, params at every step, the last state).

    With params `low`, of a bare optimizer on the weights that `storage` keeps.
    """
    # One program a step, as training has it. Within a scan over stacked gradients XLA
    # fuses their slice into the rule, and bare optax itself is rounded otherwise.
    step = jax.jit(step_function(name, tx))
    carry = (params, jax.jit(tx.init)(params))
    masters, followed = [], []
    for i in range(STEPS):
        carry = step(carry, jax.tree.map(operator.itemgetter(i), grads))
        low, carry = settled(carry, low, storage)
        masters.append(jax.device_get(masters_of(carry)))
        followed.append(jax.device_get(carry[0]))
    return stacked(masters), stacked(followed), carry[1]


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def wrapped(name, dtype="bfloat16", storage=FULL_COPY):
    # JAX does not add float32 to an 8-bit float: see docs/guide/masters.md.
    update_dtype = "params" if dtype.startswith("float8") else None
    return optax_mp.mixed_precision(
        OPTIMIZERS[name](), update_dtype=update_dtype, storage=storage
    )


def all_gradients(name):
    params = example_params(jnp.float32, name)
    return jax.device_get(example_gradients(name, params, STEPS, jnp.float32))


@functools.cache
def bare_trajectory(name):
    params = example_params(jnp.float32, name)
    return trajectory(name, OPTIMIZERS[name](), params, all_gradients(name))


def assert_same_run(name, masters, state, dtype="bfloat16"):
    bare_masters, _, bare_state = bare_trajectory(name)
    if name in CONTRACTED and not dtype.startswith("float8"):
        for a, b in zip(*map(jax.tree.leaves, (masters, bare_masters)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    else:
        assert as_bits(masters) == as_bits(bare_masters)
        assert as_bits(state.inner_state) == as_bits(bare_state)
    assert avals(state.inner_state) == avals(bare_state)


def first_gradients(name, steps=3):
    params = example_params(jnp.float32, name)
    grads = example_gradients(name, params, steps, jnp.float32)
    return [jax.tree.map(operator.itemgetter(i), grads) for i in range(steps)]


@mostly_slow(
    ("name", "dtype"),
    IN_LOW_DTYPES,
    lambda name, dtype: name == "adamw" and "16" in dtype,
)
def test_masters_and_state_are_bit_equal_to_the_bare_optimizer(name, dtype):
    params = example_params(dtype, name)
    tx, grads = wrapped(name, dtype), all_gradients(name)
    masters, followed, state = trajectory(name, tx, params, grads)
    assert_same_run(name, masters, state, dtype)
    assert avals(state) == avals(tx.init(params))
    assert all(np.isfinite(m).all() for m in jax.tree.leaves(masters))
    if dtype.startswith("float8"):
        return
    # The params of step t - 1 say what a float32 update can land on at step t.
    for master, param, start in zip(
        *map(jax.tree.leaves, (masters, followed, params)), strict=True
    ):
        param, start = np.asarray(param), np.asarray(start)
        before = np.concatenate([start[None], param[:-1]])
        want = rounded(master, param.dtype)
        exact = (want == 0) | (np.abs(want) >= smallest_landing(before))
        np.testing.assert_array_equal(param[exact], want[exact])
        miss = np.abs(param.astype(np.float64) - want.astype(np.float64))
        assert (miss <= np.abs(before.astype(np.float64)) * 2.0**-23).all()


@mostly_slow("name", sorted(DISTINCT), lambda name: name == "adamw")
def test_16_bits_split_off_are_bit_equal_to_the_bare_optimizer(name):
    """Every step: masters, inner state, and params that are masters rounded."""
    params = example_params("bfloat16", name)
    tx, grads = wrapped(name, storage=SPLIT_16), all_gradients(name)
    masters, followed, state = trajectory(name, tx, params, grads)
    assert_same_run(name, masters, state)
    for master, param in zip(*map(jax.tree.leaves, (masters, followed)), strict=True):
        assert as_bits(param) == as_bits(follow(master, param.dtype, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "storage"), [("adamw", FULL_COPY), ("muon", SPLIT_16)]
)
def test_eager_steps_are_bit_equal_to_the_bare_optimizer(name, storage):
    carries = []
    ours = wrapped(name, storage=storage)
    for tx, dtype in ((OPTIMIZERS[name](), "float32"), (ours, "bfloat16")):
        params, low = example_params(dtype, name), example_params("bfloat16", name)
        carry = (params, tx.init(params))
        for grads in first_gradients(name):
            carry = step_function(name, tx)(carry, grads)
            if tx is not ours:
                low, carry = settled(carry, low, storage)
        carries.append(carry)
    (bare_params, bare_state), ours = carries
    assert as_bits(masters_of(ours)) == as_bits(bare_params)
    assert as_bits(ours[1].inner_state) == as_bits(bare_state)


def test_state_is_stable_and_the_step_compiles_once_of_a_rule_with_a_key():
    """Of other rules it is a property of all forms."""
    name = "noisy_sgd"
    tx = wrapped(name)
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, grads):
        traces.append(1)
        return step_function(name, tx)(carry, grads)

    params = example_params("bfloat16", name)
    carry = (params, tx.init(params))
    before = avals(carry)
    for grads in first_gradients(name):
        # Donating params and state straight after `init` is part of the test.
        carry = step(carry, grads)
        assert avals(carry) == before
    assert len(traces) == 1


@mostly_slow("name", OPTIMIZERS, {"polyak_sgd", "lbfgs", "muon", "sm3"}.__contains__)
def test_updates_have_the_dtype_of_gradients_and_extra_arguments_pass(name):
    """As optax's own tests demand of each."""
    tx, params = wrapped(name), example_params("bfloat16", name)
    wide = first_gradients(name, 1)[0]
    for dtype in ("float32", "bfloat16"):
        grads = jax.tree.map(lambda g, dtype=dtype: g.astype(dtype), wide)
        extra = extra_arguments(name, grads)
        if name != "sam":  # its own update takes no others
            extra |= {"nobody_expects_this": 1}

        def update(grads, extra=extra):
            return tx.update(grads, tx.init(params), params, **extra)[0]

        found = jax.tree.map(
            lambda u: (u.shape, u.dtype.name), jax.eval_shape(update, grads)
        )
        want = jax.tree.map(lambda p, dtype=dtype: (p.shape, dtype), params)
        assert found == want, dtype


FLOAT64_TOO = ("adamw", "adafactor", "lion", "muon", "radam")


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOAT64_TOO)
def test_float64_masters_are_bit_equal_to_float64_training(name, x64):
    grads = example_gradients(name, example_params("float64"), STEPS, jnp.float64)
    grads = jax.device_get(grads)
    bare, _, bare_state = trajectory(
        name, OPTIMIZERS[name](), example_params("float64"), grads
    )
    for dtype in ("bfloat16", "float32"):
        tx = optax_mp.mixed_precision(OPTIMIZERS[name](), jnp.float64)
        masters, _, state = trajectory(name, tx, example_params(dtype), grads)
        assert as_bits(masters) == as_bits(bare)
        assert as_bits(state.inner_state) == as_bits(bare_state)
