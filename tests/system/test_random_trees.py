"""Random pytrees, dtypes, gradients and nestings against what is promised of all.

By default few examples of each, always the same; in the slow run many.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from reference import difference, follow, rounded, settle

import optax_mp

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_trees import (
    INSIDE,
    applied,
    leaves_of,
    scenarios,
)

STEPS = 3
# For a search by hand: how many examples, and whether other ones each time.
EXAMPLES = int(os.environ.get("OPTAX_MP_EXAMPLES", "0"))


def examples(count, many, *drawn):
    """Return a decorator for a test of what is `drawn`, `count` times.

    And `many` times, slowly.
    """

    def parametrized(test):
        limits = settings(
            deadline=None,
            derandomize=not EXAMPLES,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        sizes = [count, pytest.param(many, marks=pytest.mark.slow)]

        @pytest.mark.parametrize("size", sizes)
        @functools.wraps(test)
        def run(size):
            # Settings are applied to a function once, so each size has its own.
            settings(limits, max_examples=EXAMPLES or size)(given(*drawn)(test))()

        del run.__wrapped__
        return run

    return parametrized


def is_number(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def in_float32(params):
    """Return what a bare optimizer would have: float32, and nothing where hidden."""

    def shown(x):
        if not is_number(x):
            return optax.MaskedNode()
        return x if x.dtype == jnp.complex64 else x.astype(jnp.float32)

    return jax.tree.map(shown, params)


def gradients_in_float32(params, grads):
    """Return gradients as a bare optimizer would have them, in the place of each."""
    leaves, treedef = jax.tree.flatten(params)
    wanted = treedef.flatten_up_to(grads)
    return treedef.unflatten(
        in_float32(grad) if is_number(param) else optax.MaskedNode()
        for param, grad in zip(leaves, wanted, strict=True)
    )


def pairs(tree, *others):
    """Return leaves with what other trees have in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    return list(zip(leaves, *map(treedef.flatten_up_to, others), strict=True))


def is_low(x):
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def target_of(master, dtype, storage):
    """Return the param that belongs to a master."""
    if storage == optax_mp.FullCopy():
        return rounded(master, dtype)
    return follow(np.asarray(master), dtype, storage.bits)


def assert_landed(params, masters, before, updates, storage):
    """Params are rounded masters, as exactly as a sum with the update can say."""
    for now, master, was, update in pairs(params, masters, before, updates):
        if not is_low(now):
            continue
        want = target_of(master, now.dtype, storage)
        change = difference(want.astype(np.float32), np.asarray(was, np.float32))
        limit = float(jnp.finfo(update.dtype).max)
        with np.errstate(over="ignore", invalid="ignore"):
            change = np.clip(change, -limit, limit).astype(update.dtype)
        assert_numbers_equal(np.asarray(update), change)
        if update.dtype == jnp.float32:
            old, new = (np.abs(np.asarray(x, np.float32)) for x in (was, want))
            share = 2.0**-12 if now.dtype == jnp.float16 else 2.0**-15
            is_exact = (new == 0) | (new >= share * old) | np.isnan(new)
            have, want = (np.asarray(x, np.float32) for x in (now, want))
            assert_numbers_equal(have[is_exact], want[is_exact])
            miss = np.abs(have[~is_exact] - want[~is_exact])
            assert (miss <= 2.0**-23 * old[~is_exact]).all()


def assert_numbers_equal(have, want):
    np.testing.assert_array_equal(have.astype(np.float32), want.astype(np.float32))


def wanted_dtype(scenario, param, grad):
    """Return the dtype of an update, by the table in docs/guide/masters.md."""
    if scenario.storage != optax_mp.FullCopy() and is_low(param):
        return jnp.float32
    if not jnp.issubdtype(param.dtype, jnp.floating):
        return param.dtype
    if scenario.update_dtype is None:
        return grad.dtype
    if scenario.update_dtype == "params" or not is_low(param):
        return param.dtype
    return jnp.dtype(scenario.update_dtype)


@examples(3, 20, scenarios())
def test_masters_move_as_the_bare_optimizer_does(scenario):
    tx, bare = scenario.transformation(), scenario.inner()
    params = scenario.params()
    state = tx.init(params)
    weights = in_float32(optax_mp.master_params(state, params))
    bare_state = bare.init(weights)
    start = avals(state)
    for step in range(STEPS):
        grads = scenario.gradients(step)
        updates, state = tx.update(grads, state, params)
        assert avals(state) == start
        before, params = params, applied(params, updates)
        assert avals(params) == avals(before)
        for param, grad, update in pairs(before, grads, updates):
            if is_number(param):
                assert update.dtype == wanted_dtype(scenario, param, grad)
            else:
                # What has no gradient is moved by an update of zeros.
                assert update is grad or not np.asarray(update).any()
        changes, bare_state = bare.update(
            gradients_in_float32(before, grads), bare_state, weights
        )
        moved = optax.apply_updates(weights, changes)
        masters = optax_mp.master_params(state, params)
        assert jax.tree.structure(masters) == jax.tree.structure(params)
        for param, master, want, was in pairs(params, masters, moved, before):
            if is_number(param) and is_low(param):
                want = kept(want, was, scenario.storage)
                assert as_bits(with_one_nan(master)) == as_bits(with_one_nan(want))
            else:
                assert master is param
        assert as_bits(state.inner_state) == as_bits(bare_state)
        assert_landed(params, masters, before, updates, scenario.storage)
        # The bare optimizer goes on from what is kept.
        weights = in_float32(masters)


def with_one_nan(x):
    """Return `x` with one bit pattern for NaN, whose sign means nothing."""
    return np.where(np.isnan(x), np.float32(np.nan), x)


def kept(master, param, storage):
    """Return the master as a storage keeps it after a step of `param`."""
    if storage == optax_mp.FullCopy():
        return master
    return settle(np.asarray(master), np.asarray(param), storage.bits)[1]


def with_a_fault(scenario, grads):
    """Return gradients of which one number is not finite; None if there is none."""
    rng = np.random.default_rng(scenario.seed)
    leaves, treedef = jax.tree.flatten(grads)
    places = [i for i, x in enumerate(leaves) if is_number(x) and x.size]
    if not places:
        return None
    place = rng.choice(places)
    # float8_e4m3fn has no infinity.
    values = np.array(leaves[place]).reshape(-1)
    bad = (
        np.nan if values.dtype.name == "float8_e4m3fn" else rng.choice([np.inf, np.nan])
    )
    values[rng.integers(values.size)] = bad
    leaves[place] = jnp.asarray(values.reshape(leaves[place].shape))
    return treedef.unflatten(leaves)


SKIPPERS = {
    "dynamic": lambda tx: optax_mp.dynamic_loss_scale(tx, init_scale=2.0),
    "static": lambda tx: optax_mp.static_loss_scale(tx),
    "link": lambda tx: optax.chain(optax_mp.dynamic_loss_scale(init_scale=2.0), tx),
    "two": lambda tx: optax_mp.static_loss_scale(optax_mp.static_loss_scale(tx)),
}


@examples(2, 20, scenarios(), st.sampled_from(sorted(SKIPPERS)), st.booleans())
def test_a_skipped_step_changes_no_bit(scenario, skipper, under_jit):
    tx = SKIPPERS[skipper](scenario.transformation())
    params = scenario.params()
    bad = with_a_fault(scenario, scenario.gradients(1))
    assume(bad is not None)
    if skipper == "link":
        assume(any(x.is_low for x in leaves_of(scenario.tree)))
    # JAX adds float32 updates to no float8.
    assume(skipper != "link" or scenario.update_dtype != "params")
    state = tx.init(params)
    update = jax.jit(tx.update) if under_jit else tx.update
    if under_jit:
        assume(scenario.of_hidden != "float0")
    updates, state = update(scenario.gradients(0), state, params)
    if scenario.seed % 2:  # else they keep their negative zeros
        params = applied(params, updates)
    updates, after = update(bad, state, params)
    assert avals(after) == avals(state)
    assert as_bits(applied(params, updates)) == as_bits(params)
    if skipper == "link":
        assert int(after[0].total_skipped_count) == 1
        assert as_bits(after[1]) == as_bits(state[1])
    else:
        assert int(after.total_skipped_count) == 1
        assert as_bits(innermost(after)) == as_bits(innermost(state))


def innermost(state):
    while isinstance(state, optax_mp.LossScaleState):
        state = state.inner_state
    return state


def buffers(tree):
    """Return where each array that is not empty lies."""
    out = []
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        elif leaf.size:
            out.append(leaf.unsafe_buffer_pointer())
    return out


@examples(2, 20, scenarios(insides=set(INSIDE) - {"low_bit_state"}), st.booleans())
def test_conversion_there_and_back_keeps_every_bit(scenario, with_scale):
    tx = scenario.transformation()
    other = optax_mp.mixed_precision(scenario.inner())
    if with_scale:
        other = optax_mp.dynamic_loss_scale(other)
    params = scenario.params()
    state = tx.init(params)
    updates, state = tx.update(scenario.gradients(0), state, params)
    params = applied(params, updates)
    there = optax_mp.convert_opt_state(state, params, tx, other)
    assert avals(there) == avals(other.init(params))
    back = optax_mp.convert_opt_state(there, params, other, tx)
    assert avals(back) == avals(state)
    assert as_bits(back) == as_bits(state)
    places = buffers((params, state, there, back))
    assert len(places) == len(set(places))
