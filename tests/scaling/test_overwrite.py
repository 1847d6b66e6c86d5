"""Leaves that are overwritten with their gradient, as flax's fp8 layers have them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from slow_cases import mostly_slow

import optax_mp

NAME = "_overwrite_with_gradient"
SIGNS = [1.0, -1.0]


def tree(weight, scale):
    return {"params": {"kernel": weight}, NAME: {"dense": {"kernel_scale": scale}}}


def scale_of(tree):
    return tree[NAME]["dense"]["kernel_scale"]


def wrapper(inner):
    return optax_mp.dynamic_loss_scale(inner, init_scale=2.0**10)


def land(params, grads):
    """Return overwritten leaves after a step."""
    tx = wrapper(optax.sgd(0.1))

    def step(param, grad):
        params, grads = tree(jnp.ones(1), param), tree(jnp.ones(1), grad)
        updates, _ = tx.update(grads, tx.init(params), params)
        return scale_of(optax.apply_updates(params, updates))

    found = jax.jit(step)(params, grads)
    assert found.dtype == params.dtype
    return np.asarray(found, np.float32)


def assert_exact_in_16_bits(found, params, grads):
    """Where a float32 sum is fine enough for the leaf's dtype, it is exact."""
    if params.dtype != jnp.float32:
        params, grads = np.asarray(params, np.float32), np.asarray(grads, np.float32)
        fine = np.abs(grads) >= 2.0**-12 * np.abs(params)
        np.testing.assert_array_equal(found[fine], grads[fine])


# The wrapper


def test_overwritten_leaves_become_their_gradient_or_stay():
    tx = wrapper(optax_mp.mixed_precision(optax.adamw(1e-2, weight_decay=0.5)))
    params = tree(jnp.ones((2, 2), jnp.float16), jnp.array([1.0, 448.0]))
    state = tx.init(params)
    moments = optax.tree.get_all_with_path(state, "mu")[0][1]
    assert len(jax.tree.leaves(moments)) == 1
    update = jax.jit(tx.update)
    for bad in (False, True):
        weight_grad = jnp.full((2, 2), jnp.inf if bad else 1024.0)
        grads = tree(weight_grad, jnp.array([0.5, 0.25]))
        updates, after = update(grads, state, params)
        new = optax.apply_updates(params, updates)
        want = params if bad else grads
        assert as_bits(new[NAME]) == as_bits(want[NAME])
        assert bool(after.last_finite) is not bad
        assert avals(after) == avals(state)


@pytest.mark.parametrize(
    "make", [optax_mp.dynamic_loss_scale, optax_mp.static_loss_scale]
)
def test_overwritten_leaves_need_params(make):
    tx = make(optax.sgd(0.1))
    params = tree(jnp.ones(2), jnp.ones(1))
    expected = f"^{make.__name__}: expected `params`, got None"
    with pytest.raises(ValueError, match=expected):
        tx.update(params, tx.init(params))


# Where the leaf lands


@mostly_slow(
    ("dtype", "param", "sign"),
    itertools.product(
        ["float32", "bfloat16", "float16"], [0.0, 1e-9, 1.0, 448.0, -3e4], SIGNS
    ),
    lambda dtype, param, sign: (
        param in (0.0, 448.0) and sign == -1 and dtype != "float16"
    ),
)
def test_no_gradient_but_zero_brings_a_leaf_to_zero(dtype, param, sign):
    """Over all magnitudes of the dtype; CPUs take subnormal float32 numbers for 0."""
    powers = np.arange(-24, 16) if dtype == "float16" else np.arange(-126, 127)
    grads = jnp.asarray(sign * 2.0**powers, dtype)
    params = jnp.full(grads.shape, param, dtype)
    found, want = land(params, grads), np.asarray(grads, np.float32)
    assert (np.sign(found) == sign).all()
    # No sum is finer than a unit in the last place of its larger term.
    size = np.maximum(np.abs(np.asarray(params, np.float32)), np.abs(want))
    assert (np.abs(found - want) <= 2.0**-22 * size).all()
    assert_exact_in_16_bits(found, params, grads)


def test_a_leaf_lands_on_the_nearest_value_that_is_not_zero():
    # From 1.0 a float32 sum reaches 2^-24 above 0, and 2^-23 below.
    found = land(jnp.array([1.0, 1, -1, -1]), jnp.array([1e-9, -1e-9, -1e-9, 1e-9]))
    assert found.tolist() == [2.0**-24, -(2.0**-23), -(2.0**-24), 2.0**-23]


@mostly_slow("dtype", ["float32", "bfloat16"], lambda dtype: dtype == "bfloat16")
def test_an_infinite_leaf_stays_where_no_sum_brings_it_back(dtype):
    params = jnp.array([np.inf, -np.inf, np.inf, -np.inf, 1.0, 1.0], dtype)
    grads = jnp.array([np.inf, -np.inf, 2.0, 0.0, np.inf, -np.inf], dtype)
    want = [np.inf, -np.inf, np.inf, -np.inf, np.inf, -np.inf]
    assert land(params, grads).tolist() == want


# The link


@pytest.mark.filterwarnings("ignore:.*are to take the place of their params")
def test_a_link_hands_overwritten_gradients_on_as_they_are():
    """Neither unscaled nor checked, and not zeroed on a skipped step."""
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0**10)
    params = tree(jnp.ones(2), jnp.ones(2))
    state = tx.init(params)
    scale = jnp.array([np.inf, np.nan], jnp.bfloat16)
    for weight, finite in ((1024.0, True), (np.inf, False)):
        grads = tree(jnp.full(2, weight), scale)
        updates, after = jax.jit(tx.update)(grads, state, params)
        assert as_bits(updates[NAME]) == as_bits(grads[NAME])
        assert bool(after.last_finite) is finite
        kernel = updates["params"]["kernel"]
        assert as_bits(kernel) == as_bits(jnp.full(2, 1.0 if finite else -0.0))


def test_a_link_warns_of_overwritten_leaves_and_needs_no_params_for_them():
    tx = optax_mp.dynamic_loss_scale(init_scale=2.0)
    grads = tree(jnp.full(2, 2.0), jnp.ones(1))
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="moves these params as if"):
        updates, _ = tx.update(grads, tx.init(grads))
    assert updates["params"]["kernel"].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:.*are to take the place of their params")
def test_mixed_precision_knows_a_skipped_step_by_the_other_leaves():
    adamw = optax_mp.mixed_precision(optax.adamw(1e-2))
    tx = optax.chain(optax_mp.dynamic_loss_scale(), adamw)
    params = tree(jnp.ones((2, 2), jnp.bfloat16), jnp.array([1.0, 448.0]))
    grads = tree(jnp.full((2, 2), np.nan), jnp.array([2.0, 0.5]))
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(grads, state, params)
    assert as_bits(after[1]) == as_bits(state[1])
    assert as_bits(optax.apply_updates(params, updates)) == as_bits(params)


def test_overwritten_leaves_can_be_replaced_in_the_loop():
    """What the docs say to do: hide them from the optimizer, and set them exactly."""
    adamw = optax_mp.mixed_precision(optax.adamw(1e-2))
    chain = optax.chain(optax_mp.dynamic_loss_scale(init_scale=2.0**10), adamw)
    tx = optax.masked(chain, lambda params: {name: name != NAME for name in params})
    params = tree(jnp.ones((2, 2), jnp.bfloat16), jnp.array([1.0, 448.0]))

    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        finite = optax.tree.get(opt_state, "last_finite")
        new = optax.apply_updates(params, updates)
        new[NAME] = optax_mp.select_tree(finite, grads[NAME], params[NAME])
        return new, opt_state

    for bad in (False, True):
        weight_grad = jnp.full((2, 2), np.nan if bad else 1024.0)
        grads = tree(weight_grad, jnp.array([1e-9, 1e-3]))
        new, state = step(params, tx.init(params), grads)
        moments = optax.tree.get_all_with_path(state, "mu")[0][1]
        assert len(jax.tree.leaves(moments)) == 1
        assert as_bits(new[NAME]) == as_bits((params if bad else grads)[NAME])
        assert (as_bits(new["params"]) == as_bits(params["params"])) is bad
