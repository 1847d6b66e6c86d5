"""Infinite params, such as the mask of an attention, and infinite masters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import mostly_slow
from steps import take_steps

import optax_mp

mixed = optax_mp.mixed_precision
INF = np.inf
INFINITE = [-INF, 1.5, 0.0, 2.0**-20, INF, -INF]


def masked_params(dtype, values=INFINITE):
    """Return params with a mask: four lines of these values."""
    mask = jnp.tile(jnp.array(values, dtype), (4, 1))
    return {"mask": mask, "w": jnp.linspace(-2, 2, 64).astype(dtype)}


def split(bits, inner):
    return mixed(inner, storage=optax_mp.Split(bits))


RULES = {
    "decay": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "decay of 0": lambda: optax.adamw(1e-2, weight_decay=0.0),
    "decay of others": lambda: optax.adamw(1e-2, mask={"mask": False, "w": True}),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
}
# In which infinities stay.
STAY = {"decay of 0", "decay of others", "clipped"}


@mostly_slow(
    ("rule", "bits"),
    [*itertools.product(RULES, [None]), ("decay", 16)],
    lambda rule, bits: rule in {"decay", "decay of others"} and bits is None,
)
def test_what_a_rule_makes_of_infinities_is_what_float32_training_has(rule, bits):
    """Weight decay, for one, makes them NaN: inf - rate * decay * inf."""
    inner = RULES[rule]()
    tx = mixed(inner) if bits is None else split(bits, inner)
    params = masked_params("bfloat16")
    weights = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    grads = {"mask": jnp.zeros((4, 6)), "w": jnp.full(64, 2.0**-4)}
    params, state = take_steps(tx, params, tx.init(params), [grads] * 4)
    want, _ = take_steps(inner, weights, inner.init(weights), [grads] * 4)
    masters = optax_mp.master_params(state, params)
    for name, master in masters.items():
        # XLA may contract the last multiplication with the addition.
        np.testing.assert_allclose(master, want[name], rtol=0, atol=2.0**-22)
    is_nan = np.isnan(np.asarray(want["mask"]))
    assert (np.isnan(np.asarray(params["mask"], np.float32)) == is_nan).all()
    assert is_nan[:, np.isinf(INFINITE)].all() if rule not in STAY else not is_nan.any()


# Edits from outside


@pytest.mark.parametrize("jitted", [True, False])
def test_a_param_that_is_set_to_infinity_stays_until_it_is_cast_anew(jitted):
    """Unless its master is NaN, which shows."""
    tx = mixed(optax.sgd(1.0))
    params = masked_params("bfloat16", [1.0] * 6)
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
