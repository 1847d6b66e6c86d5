"""mixed_precision inside and outside of optax's wrappers, against bare float32 optax."""

import itertools
import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from comparison import as_bits, avals
from optimizers import example_gradients, example_params
from reference import follow, rounded
from slow_cases import mostly_slow
from steps import take_steps

import optax_mp

STEPS = 20


def run(tx, dtype, *, grad_dtype="float32", wrap=lambda p: p, masters=True):
    """Return (params or masters, params, state) after `STEPS` steps under jit."""
    tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    params = wrap(example_params(dtype))
    # Lookahead moves two copies of the params by the gradients of one.
    like = getattr(params, "fast", params)
    grads = jax.device_get(example_gradients("", like, STEPS, grad_dtype))

    # One program a step, as training has it: see `trajectory` in test_contract.
    start = params, jax.jit(tx.init)(params)
    each = (jax.tree.map(operator.itemgetter(i), grads) for i in range(STEPS))
    params, state = take_steps(tx, *start, each)
    assert avals((params, state)) == avals(start)
    truth = optax_mp.master_params(state, params) if masters else params
    return truth, params, state


SPLIT = optax_mp.Split(bits=16)


def assert_follows(masters, params, storage=None):
    for master, param in zip(*map(jax.tree.leaves, (masters, params)), strict=True):
        dtype = np.asarray(param).dtype
        want = rounded(master, dtype)
        if storage == SPLIT:
            want = follow(np.asarray(master), dtype, 16)
        np.testing.assert_array_equal(np.asarray(param), want)


INSIDE = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.cosine_decay_schedule(1e-2, STEPS), weight_decay=1e-2
    ),
    "partition": lambda: optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2, momentum=0.9)},
        {"kernel": "a", "layer": [{"bias": "b"}], "scale": "b"},
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 3),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(1e-2), 1e-2),
    "flatten": lambda: optax.flatten(optax.adamw(1e-2)),
}


@mostly_slow(
    ("nesting", "dtype"),
    itertools.product(INSIDE, ["bfloat16", "float16"]),
    lambda *case: case in {("partition", "float16"), ("MultiSteps", "bfloat16")},
)
def test_wrappers_inside_move_masters_as_they_move_float32(nesting, dtype):
    bare, _, bare_state = run(INSIDE[nesting](), "float32", masters=False)
    tx = optax_mp.mixed_precision(INSIDE[nesting]())
    masters, params, state = run(tx, dtype)
    got, want = (masters, state.inner_state), (bare, bare_state)
    if nesting.startswith("MultiSteps") or nesting == "schedule_free":
        # XLA contracts differently in the `lax.cond` of `MultiSteps`, and where the
        # master is compared with its param.
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), got, want
        )
    else:
        assert as_bits(got) == as_bits(want)
    assert_follows(masters, params)


OUTSIDE = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": tx}, {"kernel": "a", "layer": [{"bias": "b"}], "scale": "b"}
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 3),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@mostly_slow(
    ("nesting", "grad_dtype"),
    itertools.product(OUTSIDE, ["float32", "bfloat16"]),
    lambda *case: case in {("MultiSteps", "float32"), ("apply_if_finite", "bfloat16")},
)
def test_wrappers_outside_see_an_ordinary_optimizer(nesting, grad_dtype):
    wrap = OUTSIDE[nesting]
    # What the wrapper does to 16-bit gradients is its own affair (clipping rounds its
    # norm, MultiSteps its mean), so the bare run gets them in the same dtype.
    upcast = optax.stateless(lambda g, _: optax.tree.cast(g, jnp.float32))
    bare_tx = wrap(optax.chain(upcast, optax.adamw(1e-2)))
    tx = wrap(optax_mp.mixed_precision(optax.adamw(1e-2)))
    if grad_dtype == "float32":
        bare, _, _ = run(bare_tx, "float32", masters=False)
        masters, params, _ = run(tx, "bfloat16")
        if nesting in ("apply_if_finite", "MultiSteps", "chain"):
            # Where one of the two crosses a `lax.cond` and the other does not, XLA may
            # contract a multiply and an add to one rounding in only one of them: half a
            # unit a step. (Clipped float32 gradients enter ours by a cond, since they
            # may carry the mark of a skipped step.)
            for a, b in zip(*map(jax.tree.leaves, (masters, bare)), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=STEPS * 2.0**-24)
        else:
            assert as_bits(masters) == as_bits(bare)
        assert_follows(masters, params)
    else:
        masters, params, _ = run(tx, "bfloat16", grad_dtype=grad_dtype)
        for master, param in zip(*map(jax.tree.leaves, (masters, params)), strict=True):
            # A 16-bit update may miss by half a unit of the step, for one step.
            np.testing.assert_allclose(
                np.asarray(param, np.float32), master, rtol=2.0**-7, atol=1e-4
            )


@pytest.mark.parametrize("outside", [True, False])
def test_a_hyperparameter_set_in_the_state_reaches_the_inner_rule(outside):
    def build(learning_rate):
        inner = optax.sgd(learning_rate)
        return optax_mp.mixed_precision(inner) if outside else inner

    tx = optax.inject_hyperparams(build)(learning_rate=0.5)
    tx = tx if outside else optax_mp.mixed_precision(tx)
    params = {"w": jnp.zeros(3, jnp.bfloat16)}
    state = optax.tree.set(tx.init(params), learning_rate=jnp.float32(0.25))
    updates, _ = tx.update({"w": jnp.ones(3)}, state, params)
    np.testing.assert_array_equal(updates["w"], -0.25)


def test_optax_tree_functions_find_their_way():
    tx = optax_mp.mixed_precision(optax.adam(1e-2))
    state = tx.init(example_params("bfloat16"))
    doubled = optax.tree.map_params(tx, lambda x: x * 2, state)
    want = jax.tree.map(lambda x: x * 2, state.master_params)
    assert as_bits(doubled.master_params) == as_bits(want)
    assert int(optax.tree.get(state, "count")) == 0
