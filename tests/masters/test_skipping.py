"""Skipped steps, behind a link and inside a loss scale: nothing moves, in any form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promises import (
    ADAMW,
    WEIGHTS,
    check_a_skipped_step_moves_nothing,
    check_there_is_no_conditional,
)
from slow_cases import mostly_slow

import optax_mp

IN_FLOAT32 = jax.tree.map(lambda x: x.astype(jnp.float32), WEIGHTS)
LABELS = {"w": "low", "scale": "low", "norm": "own"}


def mixed(inner=ADAMW, **settings):
    return optax_mp.mixed_precision(inner, **settings)


# What stands behind the loss scale, and the params that it gets.
FORMS = {
    "full copies": (mixed, WEIGHTS),
    "split 16": (lambda: mixed(storage=optax_mp.Split(16)), WEIGHTS),
    "split 8": (lambda: mixed(storage=optax_mp.Split(8)), WEIGHTS),
    "all float32": (mixed, IN_FLOAT32),
    "groups": (
        lambda: optax.partition({"low": mixed(), "own": mixed(optax.sgd(0.1))}, LABELS),
        WEIGHTS,
    ),
    "MultiSteps inside": (lambda: mixed(optax.MultiSteps(ADAMW, 2)), WEIGHTS),
    "MultiSteps between": (lambda: optax.MultiSteps(mixed(), 2), WEIGHTS),
}
# By default what differs most, and eager only the one that has the most parts.
A_FEW = {"split 8", "all float32", "groups"}


@mostly_slow(
    ("form", "where", "jitted"),
    [
        (form, where, jitted)
        for form in FORMS
        for where in ("link", "around")
        for jitted in (True, False)
        # MultiSteps outside of a `mixed_precision` counts the zeros of a link.
        if (form, where) != ("MultiSteps between", "link") and (jitted or form in A_FEW)
    ],
    lambda form, where, jitted: (
        jitted
        and (form in A_FEW) == (where == "link")
        and (where == "link" or form == "MultiSteps between")
    ),
)
def test_in_a_skipped_step_nothing_moves(form, where, jitted):
    build, params = FORMS[form]
    check_a_skipped_step_moves_nothing(build(), where, jitted, params)


@pytest.mark.parametrize(
    "around",
    [
        lambda rule: optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(rule)),
        lambda rule: optax.chain(
            optax_mp.dynamic_loss_scale(), optax_mp.mixed_precision(rule)
        ),
    ],
)
def test_a_rule_gets_no_extra_argument_but_its_own(around):
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: -g * value, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = around(rule)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    grads = {"w": jnp.full(3, np.inf)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, value=1.0)
    assert updates["w"].shape == (3,)


@pytest.mark.parametrize("grad_dtype", ["float32", "float16"])
@pytest.mark.parametrize("where", ["alone", "inside", "behind a link"])
def test_a_choice_copies_no_state(where, grad_dtype):
    """XLA for CPUs copies what a later choice would read again: 8 bytes a weight."""
    tx = {
        "alone": mixed(),
        "inside": optax_mp.dynamic_loss_scale(mixed()),
        "behind a link": optax.chain(optax_mp.dynamic_loss_scale(), mixed()),
    }[where]
    params = {name: jnp.ones((256, 256), jnp.float16) for name in "ab"}
    grads = jax.tree.map(lambda p: p.astype(grad_dtype), params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    state = jax.eval_shape(tx.init, params)
    compiled = jitted.lower(params, state, grads).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    # At most the flags of the check, a byte for each element of a leaf.
    assert temporaries < 1.1 * 2 * 256**2


@pytest.mark.parametrize("form", [x for x in FORMS if "MultiSteps" not in x])
def test_no_step_has_a_conditional(form):
    build, params = FORMS[form]
    check_there_is_no_conditional(build(), params)
