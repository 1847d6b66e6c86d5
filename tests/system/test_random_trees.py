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
from reference import settle

import optax_mp

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_trees import (
    applied,
    leaves_of,
    scenarios,
)

# Of params that are frozen inside, and of `Split` for float32 params alone.
pytestmark = pytest.mark.filterwarnings(
    "ignore:mixed_precision. (.inner. does not train|the storage .* stores nothing)"
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


@examples(2, 12, scenarios())
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
            # What has no gradient is moved by an update of zeros.
            is_moved = is_number(param) or update is grad
            assert is_moved or not np.asarray(update).any()
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
                assert as_bits(master) == as_bits(param)
        assert as_bits(state.inner_state) == as_bits(bare_state)
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


@examples(2, 12, scenarios(), st.sampled_from(sorted(SKIPPERS)), st.booleans())
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
