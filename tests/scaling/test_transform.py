"""dynamic_loss_scale and static_loss_scale: what a skipped step leaves, in any nesting."""

import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from comparison import as_bits, avals
from optimizers import (
    OPTIMIZERS,
    example_gradients,
    example_params,
    extra_arguments,
)
from slow_cases import mostly_slow

import optax_mp


def wrapper(inner, init_scale=2.0**10):
    return optax_mp.dynamic_loss_scale(inner, init_scale=init_scale)


def wrapped_masters(inner, init_scale=2.0**10):
    return wrapper(optax_mp.mixed_precision(inner), init_scale)


def linked_masters(inner, init_scale=2.0**10):
    return optax.chain(
        optax_mp.dynamic_loss_scale(init_scale=init_scale),
        optax.clip_by_global_norm(1.0),
        optax_mp.mixed_precision(inner),
    )


def gradients_for(name, steps):
    params = example_params("float32", name)
    grads = jax.device_get(example_gradients(name, params, steps, jnp.float32))
    return [jax.tree.map(operator.itemgetter(i), grads) for i in range(steps)]


def spoiled(grads, value=np.nan):
    """Return gradients of which one element is not finite."""
    kernel = np.array(grads["kernel"])
    kernel.flat[3] = value
    return grads | {"kernel": kernel}


def without_scale(state):
    """Return what a skipped step must not move."""

    def is_scale(node):
        return isinstance(node, optax_mp.LossScaleState)

    parts = jax.tree.leaves(state, is_leaf=is_scale)
    return [part.inner_state if is_scale(part) else part for part in parts]


def stepper(tx, name=""):
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads):
        scale = optax_mp.loss_scale(state)
        scaled = jax.tree.map(lambda g: g * scale, grads)
        extra = extra_arguments(name, scaled)
        updates, state = tx.update(scaled, state, params, **extra)
        return optax.apply_updates(params, updates), state, updates

    return step


def assert_negative_zero(updates):
    for leaf in map(np.asarray, jax.tree.leaves(updates)):
        assert (leaf == 0).all() and np.signbit(leaf).all()


BUILDS = {"float16": wrapped_masters, "float32": wrapper, "bfloat16": linked_masters}


# That a skip keeps every leaf is a property of all forms. What is left are rules with a
# key for random numbers, and with steps of their own inside.
@mostly_slow(
    ("name", "dtype"),
    [*itertools.product(["adamw"], ["float16", "bfloat16"]),
     ("noisy_sgd", "float32"), ("sam", "float16")],
    lambda name, dtype: name == "adamw",
)  # fmt: skip
def test_a_run_with_bad_steps_is_bitwise_the_run_without_them(name, dtype):
    tx = BUILDS[dtype](OPTIMIZERS[name]())
    step = jax.jit(stepper(tx, name))
    params = example_params(dtype, name)
    good = clean = params, tx.init(params)
    first, second, third = gradients_for(name, 3)
    for grads in (first, second, third):
        *clean, _ = step(*clean, grads)

    for grads in (first, "bad", "bad", second, "bad", third):
        if grads != "bad":
            *good, _ = step(*good, grads)
            continue
        *after, updates = step(*good, spoiled(first, np.inf))
        assert_negative_zero(updates)
        assert as_bits(after[0]) == as_bits(good[0])
        assert as_bits(without_scale(after[1])) == as_bits(without_scale(good[1]))
        assert avals(after) == avals(good)
        good = after
    # The scale has changed between, and no result depends on it.
    assert as_bits(good[0]) == as_bits(clean[0])
    assert as_bits(without_scale(good[1])) == as_bits(without_scale(clean[1]))


# The nestings of docs/guide/loss_scaling.md.

STEPS = 12


def trained(tx, step, bad=()):
    """Return (masters or params, state) after steps of which some are bad."""
    params = example_params("float16")
    carry = params, tx.init(params)
    for i, grads in enumerate(gradients_for("", STEPS)):
        if i in bad:
            *carry, _ = step(*carry, spoiled(grads))
        *carry, _ = step(*carry, grads)
    params, state = carry
    try:
        return optax_mp.master_params(state, params), state
    except ValueError:
        return params, state


masters = optax_mp.mixed_precision
SKIPS = {
    "MultiSteps of masters": lambda: wrapper(
        optax.MultiSteps(masters(optax.adamw(1e-2)), 3)
    ),
    "the scale within masters": lambda: masters(wrapper(optax.adamw(1e-2))),
    "link, apply_if_finite": lambda: optax.chain(
        optax_mp.dynamic_loss_scale(init_scale=2.0**10),
        optax.apply_if_finite(masters(optax.adamw(1e-2)), 3),
    ),
}  # fmt: skip


@mostly_slow("nesting", SKIPS, lambda nesting: nesting == "MultiSteps of masters")
def test_bad_micro_batches_are_dropped_entirely_in(nesting):
    tx = SKIPS[nesting]()
    step = jax.jit(stepper(tx))
    clean, clean_state = trained(tx, step)
    # Also two in a row, and one in the midst of an accumulation.
    dropped, state = trained(tx, step, bad=(0, 4, 5, 10))
    assert as_bits(dropped) == as_bits(clean)
    assert as_bits(without_scale(state)) == as_bits(without_scale(clean_state))
    found = optax.tree.get_all_with_path(state, "total_skipped_count")
    assert [int(count) for _, count in found] == [4]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))


def test_a_clipped_result_depends_on_no_scale_and_no_bad_step():
    inner = masters(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)))
    results = []
    for tx, bad in (
        (wrapper(inner, 2.0**15), ()),
        (optax_mp.static_loss_scale(inner, 8.0), (0, 4, 5)),
    ):
        params, state = trained(tx, jax.jit(stepper(tx)), bad)
        assert int(state.total_skipped_count) == len(bad)
        results.append(as_bits((params, without_scale(state))))
    assert results[0] == results[1]


def test_a_mark_goes_from_one_compiled_program_to_another():
    link = optax.inject_hyperparams(lambda rate: optax_mp.dynamic_loss_scale())(1.0)
    tx = optax_mp.mixed_precision(optax.adamw(1e-2))
    params = example_params("bfloat16")
    grads = jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), params)
    marked, _ = jax.jit(link.update)(grads, link.init(params), params)
    state = tx.init(params)
    _, after = jax.jit(tx.update)(marked, state, params)
    assert as_bits(after) == as_bits(state)


def test_a_link_that_never_ran_changes_nothing():
    tx = optax_mp.mixed_precision(optax.adamw(1e-2))
    params = example_params("bfloat16")
    grads = jax.tree.map(lambda p: jnp.full(p.shape, -0.0), params)
    args = grads, tx.init(params), params
    without = str(jax.make_jaxpr(lambda *args: tx.update(*args))(*args))
    optax_mp.dynamic_loss_scale().init(params)
    assert str(jax.make_jaxpr(lambda *args: tx.update(*args))(*args)) == without
    assert int(tx.update(*args)[1].inner_state[0].count) == 1


def test_negative_zeros_are_a_skipped_step_unless_one_element_differs(after_a_link):
    tx = optax_mp.mixed_precision(optax.sgd(1.0, momentum=0.5))
    params = example_params("bfloat16")
    update = jax.jit(tx.update)
    ones = jax.tree.map(lambda p: np.ones(p.shape, np.float32), params)
    # A step moves the momentum, whatever the gradient; a skipped one does not.
    moving = update(ones, tx.init(params), params)[1]
    zeros = jax.tree.map(lambda x: np.full_like(x, -0.0), ones)
    updates, after = update(zeros, moving, params)
    assert_negative_zero(updates)
    assert as_bits(after) == as_bits(moving)
    for leaf in ("kernel", "layer", "scale"):
        for value in (0.0, -1e-30, np.nan):
            grads = jax.tree.map(np.copy, zeros)
            target = jax.tree.leaves(grads[leaf])[0]
            target.flat[target.size - 1] = value
            after = update(grads, moving, params)[1]
            assert as_bits(after) != as_bits(moving), (leaf, value)


# Unscaling, and what counts as an overflow.


@pytest.mark.parametrize("inner", [None, optax.identity()], ids=["link", "around"])
def test_gradients_are_unscaled_in_float32(inner):
    tx = optax_mp.dynamic_loss_scale(inner, init_scale=2.0**15)
    values = np.array([1.5, -3.0, 6e-5], np.float32)
    floats = {x: jnp.asarray(values, x) for x in ("float16", "bfloat16", "float32")}
    grads = floats | {"n": jnp.int32(3), "none": None}
    params = jax.tree.map(jnp.ones_like, grads)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    for name, grad in floats.items():
        want = np.asarray(grad, np.float32) / 2.0**15
        assert updates[name].dtype == jnp.float32
        np.testing.assert_array_equal(updates[name], want)
    assert int(updates["n"]) == 3


def test_a_gradient_that_overflows_only_when_unscaled_is_an_overflow():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0**-4)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state, update = tx.init(params), jax.jit(tx.update)
    updates, after = update({"w": jnp.array([1, 1e38, 1], jnp.bfloat16)}, state, params)
    assert_negative_zero(updates)
    assert not bool(after.last_finite)
    large = {"w": jnp.array([1, 1e37, 1], jnp.bfloat16)}
    assert bool(update(large, state, params)[1].last_finite)


def test_complex_leaves_are_unscaled_and_skipped():
    tx = wrapper(optax.sgd(1.0))
    params = {"z": jnp.ones(2, jnp.complex64), "w": jnp.ones(2)}
    state = tx.init(params)
    grads = {"z": jnp.full(2, 1024 + 2048j, jnp.complex64), "w": jnp.ones(2)}
    update = jax.jit(tx.update)
    updates, _ = update(grads, state, params)
    np.testing.assert_array_equal(updates["z"], np.full(2, -1 - 2j))
    bad = grads | {"z": jnp.array([1, complex(0, np.nan)], jnp.complex64)}
    updates, after = update(bad, state, params)
    assert int(after.total_skipped_count) == 1
    assert as_bits(optax.apply_updates(params, updates)) == as_bits(params)


def test_members_of_a_vmap_have_scales_of_their_own():
    tx = wrapped_masters(optax.adamw(1e-2))
    params = {"kernel": jnp.ones((3, 2, 2), jnp.float16)}
    state = jax.vmap(tx.init)(params)
    grads = {"kernel": np.ones((3, 2, 2), np.float32)}
    grads["kernel"][1, 0, 0] = np.inf
    after, new_state, _ = jax.jit(jax.vmap(stepper(tx)))(params, state, grads)
    moved = np.asarray(after["kernel"] != params["kernel"]).any(axis=(1, 2))
    assert moved.tolist() == [True, False, True]
    scales = jax.vmap(optax_mp.loss_scale)(new_state)
    assert scales.tolist() == [1024, 512, 1024]


# Training, diagnosis, errors.


def test_a_state_that_is_the_last_gradient_and_params_is_kept_in_a_skipped_step():
    inner = optax.GradientTransformation(
        lambda params: (params, params),
        lambda updates, state, params=None: (updates, (updates, params)),
    )
    tx = wrapper(inner)
    params = jnp.arange(2.0)
    step = jax.jit(tx.update)
    grads = 8 * jnp.ones(2)
    _, state = step(grads, tx.init(params), params)
    want = as_bits((grads / state.scale, params))
    for bad in (1.0, jnp.inf):
        _, state = step(grads * bad, state, params + (bad > 1))
        assert as_bits(state.inner_state) == want


def test_gradients_are_divided_by_the_scale_that_the_loss_had():
    """And not by the next one, after a step at which the scale grows."""
    tx = optax_mp.dynamic_loss_scale(optax.sgd(1.0), init_scale=8.0, growth_interval=1)
    params = {"w": jnp.ones(2)}
    updates, state = tx.update({"w": jnp.full(2, 8.0)}, tx.init(params), params)
    assert state.scale == 16 and updates["w"].tolist() == [-1.0, -1.0]


def test_the_gradient_for_a_line_search_is_unscaled_as_well():
    inner = optax.GradientTransformationExtraArgs(
        lambda _: optax.EmptyState(), lambda g, s, p=None, *, grad: (grad, s)
    )
    tx = optax_mp.dynamic_loss_scale(inner, init_scale=8.0)
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.full(2, 16.0)}
    updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
    assert updates["w"].tolist() == [2.0, 2.0]


CHANGED = {
    r"made .* the shape of float32\[2\], got float32\[4\]": lambda a: {
        "a": jnp.zeros(4)
    },
    "'a'.* is only in the state given to": lambda a: {"b": a},
}


@pytest.mark.parametrize("message", CHANGED)
def test_an_inner_state_of_another_structure_or_shape_is_named(message):
    inner = optax.GradientTransformation(
        lambda _: {"a": jnp.zeros(2)},
        lambda g, s, p=None: (g, CHANGED[message](s["a"])),
    )
    tx, params = optax_mp.dynamic_loss_scale(inner), {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params)
