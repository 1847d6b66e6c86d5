"""Skipped steps, behind a link and inside a loss scale: nothing moves, in any form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from amp_cases import operations
from comparison import as_bits
from own_storages import TwoBfloat16
from slow_cases import mostly_slow

import optax_mp

PARAMS = {
    "w": jnp.linspace(-2, 2, 12).reshape(3, 4).astype(jnp.bfloat16),
    "scale": jnp.full((), -0.0, jnp.bfloat16),
    "norm": jnp.linspace(0.5, 1, 4),
}
IN_FLOAT32 = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
LABELS = {"w": "low", "scale": "low", "norm": "own"}
adamw = optax.adamw(1e-2, weight_decay=0.1)


def mixed(inner=adamw, **settings):
    return optax_mp.mixed_precision(inner, **settings)


# What stands behind the loss scale, and the params that it gets.
FORMS = {
    "full copies": (mixed, PARAMS),
    "split 16": (lambda: mixed(storage=optax_mp.Split(16)), PARAMS),
    "split 8": (lambda: mixed(storage=optax_mp.Split(8)), PARAMS),
    "own storage": (lambda: mixed(storage=TwoBfloat16()), PARAMS),
    "all float32": (mixed, IN_FLOAT32),
    "5.1 bytes": (
        lambda: mixed(
            optax_mp.low_bit_state(adamw, min_size=1), storage=optax_mp.Split(8)
        ),
        PARAMS,
    ),
    "groups": (
        lambda: optax.partition({"low": mixed(), "own": mixed(optax.sgd(0.1))}, LABELS),
        PARAMS,
    ),
    "MultiSteps inside": (lambda: mixed(optax.MultiSteps(adamw, 2)), PARAMS),
    "MultiSteps between": (lambda: optax.MultiSteps(mixed(), 2), PARAMS),
    "stochastic rounding": (lambda: optax_mp.stochastic_rounding(adamw), PARAMS),
}
# By default what differs most, and eager only the one that has the most parts.
A_FEW = {"5.1 bytes", "all float32", "groups", "own storage", "stochastic rounding"}


def scaled_gradients(params, scale, bad=None):
    rng = np.random.default_rng(0)
    grads = {
        name: rng.standard_normal(p.shape).astype(np.float32) * float(scale)
        for name, p in params.items()
    }
    if bad is not None:
        grads["norm"][-1] = bad
    return jax.tree.map(jnp.asarray, grads)


def start(tx, params, update):
    """Return params and state after one good step."""
    state = jax.jit(tx.init)(params)
    grads = scaled_gradients(params, optax_mp.loss_scale(state))
    updates, state = update(grads, state, params)
    return optax.apply_updates(params, updates), state


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
        and (form in A_FEW - {"own storage"}) == (where == "link")
        and (where == "link" or form == "MultiSteps between")
    ),
)
def test_in_a_skipped_step_nothing_moves(form, where, jitted):
    build, params = FORMS[form]
    scale = optax_mp.dynamic_loss_scale
    tx = optax.chain(scale(), build()) if where == "link" else scale(build())
    update = jax.jit(tx.update) if jitted else tx.update
    apply = jax.jit(optax.apply_updates)
    params, state = start(tx, params, update)
    bad = np.nan if jitted else np.inf
    grads = scaled_gradients(params, optax_mp.loss_scale(state), bad)
    updates, after = update(grads, state, params)
    assert as_bits(apply(params, updates)) == as_bits(params)
    kept = (x[1:] if where == "link" else x.inner_state for x in (after, state))
    assert as_bits(next(kept)) == as_bits(next(kept))
    assert optax_mp.loss_scale(after) == optax_mp.loss_scale(state) / 2


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
    tx = optax.chain(optax_mp.dynamic_loss_scale(), build())
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    state = jax.eval_shape(tx.init, params)
    jaxpr = jax.make_jaxpr(tx.update)(grads, state, params)
    found = {each.name for each in operations(jaxpr)}
    assert found and found.isdisjoint({"cond", "while", "switch"})
