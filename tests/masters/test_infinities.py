"""Infinite params, such as the mask of an attention, and infinite masters."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from own_storages import Negated
from reference import rounded
from slow_cases import mostly_slow

import optax_mp

INF = np.inf
VALUES = [-INF, 1.5, 0.0, 2.0**-20, INF, -INF]
IS_INFINITE = np.isinf(VALUES)
adam = optax.adam(1e-2)
low_bit = functools.partial(optax_mp.low_bit_state, min_size=1)
mixed = optax_mp.mixed_precision


def split(bits, inner):
    return mixed(inner, storage=optax_mp.Split(bits))


def linked(inner):
    return optax.chain(optax_mp.dynamic_loss_scale(), inner)


FORMS = {
    "full copies": mixed,
    "split 16": lambda inner: split(16, inner),
    "split 8": lambda inner: split(8, inner),
    "own storage": lambda inner: mixed(inner, storage=Negated()),
    "stochastic rounding": optax_mp.stochastic_rounding,
    "5.1 bytes": lambda inner: split(8, low_bit(inner)),
    "link, split": lambda inner: linked(split(8, inner)),
}


def params_in(dtype, values=VALUES):
    mask = jnp.tile(jnp.array(values, dtype), (4, 1))
    return {"mask": mask, "w": jnp.linspace(-2, 2, 64).astype(dtype)}


def take_steps(tx, params, grads, *, steps=4, jitted=True):
    """Return params and state after steps with the same gradients."""
    state = tx.init(params)
    update = jax.jit(tx.update) if jitted else tx.update
    for _ in range(steps):
        scale = optax_mp.loss_scale(state)
        scaled = jax.tree.map(lambda g, s=scale: g * s.astype(g.dtype), grads)
        updates, new_state = update(scaled, state, params)
        assert avals(new_state) == avals(state)
        params, state = optax.apply_updates(params, updates), new_state
    return params, state


RUNS = [(True, "bfloat16", "float32"), (True, "float16", "float16")]
RUNS += [(False, "bfloat16", "float32")]
BASIC = ("full copies", "split 16", "stochastic rounding")


@mostly_slow(
    ("form", "run"),
    [(form, run) for form in FORMS for run in RUNS if run == RUNS[0] or form in BASIC],
    lambda form, run: form == "link, split" and run == RUNS[0],
)
def test_an_infinite_param_without_a_gradient_stays(form, run):
    jitted, dtype, grad_dtype = run
    before = params_in(dtype)
    grads = {
        "mask": jnp.zeros((4, 6), grad_dtype),
        "w": jnp.full(64, 2.0**-4, grad_dtype),
    }
    params, state = take_steps(FORMS[form](adam), before, grads, jitted=jitted)
    assert as_bits(params["mask"]) == as_bits(before["mask"])
    assert (np.asarray(params["w"]) != np.asarray(before["w"])).all()
    # Neither a remainder nor a moment beside an infinity.
    for leaf in jax.tree.leaves(state):
        if leaf.shape == (4, 6) and jnp.issubdtype(leaf.dtype, jnp.integer):
            assert not np.asarray(leaf)[:, IS_INFINITE].any()
    if "stochastic" not in form:
        masters = optax_mp.master_params(state, params)
        np.testing.assert_array_equal(masters["mask"], np.float32(before["mask"]))


@mostly_slow(
    ("form", "jitted", "dtype"),
    [
        (form, jitted, dtype)
        for form in FORMS
        for jitted, dtype in ((True, "float16"), (False, "bfloat16"))
        if jitted or form in BASIC
    ],
    lambda form, jitted, dtype: form == "link, split" and jitted,
)
def test_an_infinite_master_makes_its_param_infinite(form, jitted, dtype):
    """As in float32 training; finite masters out of the dtype's range do not."""
    diverging = optax.sgd(1e38)
    before = params_in(dtype, [1.0] * 6)
    row = [100.0, -100.0, 2.0**-10, -(2.0**-10), 0.0, 0.0]
    grads = {"mask": jnp.tile(jnp.array(row), (4, 1)), "w": jnp.zeros(64)}
    params, state = take_steps(FORMS[form](diverging), before, grads, jitted=jitted)
    want = np.float32([-INF, INF, -4e35, 4e35, 1.0, 1.0])
    found = np.asarray(params["mask"], np.float32)
    is_finite = np.isfinite(want)
    np.testing.assert_array_equal(found[:, ~is_finite], [want[~is_finite]] * 4)
    assert np.isfinite(found[:, is_finite]).all()
    assert (np.sign(found) == np.sign(want)).all()
    if dtype == "float16":
        want = rounded(want, np.float16).astype(np.float32)
        np.testing.assert_array_equal(found, [want] * 4)
    if "stochastic" not in form:
        masters = np.asarray(optax_mp.master_params(state, params)["mask"])
        assert (np.isinf(masters) == ~is_finite).all()


RULES = {
    "decay": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "decay of 0": lambda: optax.adamw(1e-2, weight_decay=0.0),
    "decay of others": lambda: optax.adamw(1e-2, mask={"mask": False, "w": True}),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), adam),
}
# In which infinities stay.
STAY = {"decay of 0", "decay of others", "clipped"}


@mostly_slow(
    ("rule", "bits"),
    itertools.product(RULES, [None, 16]),
    lambda rule, bits: rule in {"decay", "decay of others"} and bits is None,
)
def test_what_a_rule_makes_of_infinities_is_what_float32_training_has(rule, bits):
    """Weight decay, for one, makes them NaN: inf - rate * decay * inf."""
    inner = RULES[rule]()
    tx = mixed(inner) if bits is None else split(bits, inner)
    params = params_in("bfloat16")
    weights = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    grads = {"mask": jnp.zeros((4, 6)), "w": jnp.full(64, 2.0**-4)}
    params, state = take_steps(tx, params, grads)
    want, _ = take_steps(inner, weights, grads)
    masters = optax_mp.master_params(state, params)
    for name, master in masters.items():
        # XLA may contract the last multiplication with the addition.
        np.testing.assert_allclose(master, want[name], rtol=0, atol=2.0**-22)
    is_nan = np.isnan(np.asarray(want["mask"]))
    assert (np.isnan(np.asarray(params["mask"], np.float32)) == is_nan).all()
    assert is_nan[:, IS_INFINITE].all() if rule not in STAY else not is_nan.any()


# Edits from outside


@pytest.mark.parametrize("jitted", [True, False])
def test_a_param_that_is_set_to_infinity_stays_until_it_is_cast_anew(jitted):
    """Unless its master is NaN, which shows."""
    tx = mixed(optax.sgd(1.0))
    params = params_in("bfloat16", [1.0] * 6)
    state = tx.init(params)
    params["mask"] = params["mask"].at[:, :2].set(jnp.array([INF, -INF], jnp.bfloat16))
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    grads["mask"] = grads["mask"].at[3, :3].set(jnp.nan)
    update = jax.jit(tx.update) if jitted else tx.update
    updates, state = update(grads, state, params)
    after = np.asarray(optax.apply_updates(params, updates)["mask"], np.float32)
    np.testing.assert_array_equal(after[:3], [[INF, -INF, 1, 1, 1, 1]] * 3)
    np.testing.assert_array_equal(after[3], [np.nan] * 3 + [1] * 3)
    masters = optax_mp.master_params(state, params)
    anew = optax_mp.get_policy("bf16").cast_to_param(masters)["mask"]
    np.testing.assert_array_equal(np.asarray(anew, np.float32)[:3], 1.0)
