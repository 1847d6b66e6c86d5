"""Objects of Flax NNX in the place of plain trees, with the Flax of every release.

Up to Flax 0.10 a module is no pytree, and its optimizer holds the model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from forms import named
from slow_cases import mostly_slow
from steps import by_update

import optax_mp

nnx = pytest.importorskip("flax.nnx")

FULL_COPY, *OTHERS = named("masters", "Split(16)", "5 bytes")
MASTERS = FULL_COPY.of(optax.adam(0.1))


class Net(nnx.Module):
    """Something to train, and a statistic that is no param."""

    def __init__(self):
        """Make the layer."""
        self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.seen = nnx.BatchStat(jnp.zeros(()))


def plain(model):
    """Return the params of a model as a dict of NumPy arrays."""
    return {
        name: np.asarray(getattr(model.layer, name)[...]) for name in ("bias", "kernel")
    }


def trained(tx, dtype=jnp.bfloat16, bad=False):
    """Return model and optimizer after one step, or two of which one is skipped."""
    model = Net()
    params = nnx.state(model, nnx.Param)
    nnx.update(model, optax_mp.cast_floating(params, dtype))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for value in (0.25, np.nan) if bad else (0.25,):
        grads = jax.tree.map(
            lambda x, value=value: jnp.full(x.shape, value), nnx.state(model, nnx.Param)
        )
        grads = (grads,) if hasattr(optimizer, "model") else (model, grads)
        optimizer.update(*grads)
    return model, optimizer


def bare(tx, dtype=jnp.bfloat16, bad=False):
    """Return (opt_state, params) of the same run on plain trees."""
    params = optax_mp.cast_floating(plain(Net()), dtype)
    state = tx.init(params)
    for value in (0.25, np.nan) if bad else (0.25,):
        grads = {name: jnp.full(x.shape, value) for name, x in params.items()}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return state, params


def params_of(model):
    return nnx.state(model, nnx.Param)


# What users have at hand: (optimizer state, params).
GIVEN = {
    "optimizer, model": lambda model, optimizer: (optimizer, model),
    "optimizer, state": lambda model, optimizer: (optimizer, params_of(model)),
    "opt_state, model": lambda model, tx: (tx.opt_state, model),
    "opt_state, state": lambda model, tx: (tx.opt_state, params_of(model)),
}


@mostly_slow(
    ("given", "form"),
    [(given, FULL_COPY) for given in GIVEN]
    + [("optimizer, model", form) for form in OTHERS],
    lambda _, form: form is FULL_COPY,
    ids=str,
)
def test_masters_are_read_and_replaced(given, form):
    tx = form.of(optax.adam(0.1))
    model, optimizer = trained(tx)
    state, params = GIVEN[given](model, optimizer)
    expected = optax_mp.master_params(*bare(tx))
    found = optax_mp.master_params(state, params)
    assert as_bits(found) == as_bits({"layer": expected})
    if form is FULL_COPY:
        nnx.update(model, jax.tree.map(lambda x: (x + 1).astype("bfloat16"), found))
        state, params = GIVEN[given](model, optimizer)
        others = jax.tree.map(lambda x: x + 1, found)
        replaced = optax_mp.replace_master_params(state, params, others)
        assert as_bits(optax_mp.master_params(replaced, params)) == as_bits(others)
    exact = Net()
    nnx.update(exact, found)
    assert as_bits(plain(exact)) == as_bits(expected)


@pytest.mark.parametrize("given", GIVEN)
def test_a_state_without_masters_gives_the_params_in_float32(given):
    model, optimizer = trained(optax.adam(0.1), jnp.float16)
    found = optax_mp.master_params(*GIVEN[given](model, optimizer))
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"float32"}
    assert len(jax.tree.leaves(found)) == 2


@pytest.mark.parametrize("given", GIVEN)
def test_the_loss_scale_is_found_and_the_bad_leaf_named(given):
    tx = optax_mp.dynamic_loss_scale(MASTERS)
    model, optimizer = trained(tx, bad=True)
    state, params = GIVEN[given](model, optimizer)
    expected = optax_mp.metrics(bare(tx, bad=True)[0])
    assert as_bits(optax_mp.metrics(state)) == as_bits(expected)
    assert optax_mp.loss_scale(state) == 2.0**15
    assert optax_mp.scale_loss(jnp.float32(2), state) == 2.0**16
    with pytest.raises(FloatingPointError, match=r"was \['layer'\]\['bias'\]"):
        optax_mp.check_loss_scale(state, 0, params=params)


@pytest.mark.slow
def test_reports_are_of_the_params_that_are_trained():
    model, optimizer = trained(MASTERS)
    roles = optax_mp.memory_report(*bare(MASTERS)).by_role()
    for given in GIVEN.values():
        assert optax_mp.memory_report(*given(model, optimizer)).by_role() == roles
    found = optax_mp.update_report(model, nnx.state(model, nnx.Param))
    assert found.paths == ("['layer']['bias']", "['layer']['kernel']")


@pytest.mark.slow
def test_a_state_is_converted():
    model, optimizer = trained(MASTERS)
    to_tx = OTHERS[0].of(optax.adam(0.1))
    found = optax_mp.convert_opt_state(optimizer, model, MASTERS, to_tx)
    expected = optax_mp.convert_opt_state(*bare(MASTERS), MASTERS, to_tx)
    assert as_bits(found) == as_bits(expected)


@mostly_slow("is_module", [True, False], {False}.__contains__)
def test_a_state_of_params_in_variables_keeps_them(is_module):
    """As `nnx.split` gives these, without an `nnx.Optimizer`: the next step wants them."""
    model, (new,) = Net(), named("Split(16)")
    nnx.update(model, optax_mp.cast_floating(params_of(model), jnp.bfloat16))
    first, sgd, to_tx = params_of(model), optax.sgd(0.1), new.of(optax.adam(0.1))
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 0.25), first)
    params, state = by_update(MASTERS)(first, MASTERS.init(first), grads)
    nnx.update(model, params)
    given = model if is_module else params
    masters = optax_mp.master_params(state, given)
    followed = optax_mp.follow_params(state, given)
    replaced = optax_mp.replace_master_params(state, given, masters)
    converted = optax_mp.convert_opt_state(state, given, MASTERS, to_tx)
    # A state of `sgd` has no arrays, so only its params are in variables.
    of_sgd = optax_mp.convert_opt_state(sgd.init(first), given, sgd, new.of(sgd))
    for tx, found in (
        (MASTERS, followed),
        (MASTERS, replaced),
        (to_tx, converted),
        (new.of(sgd), of_sgd),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(tx.init(params))
        moved, _ = by_update(tx)(params, found, grads)
        assert jax.tree.structure(moved) == jax.tree.structure(params)
    assert as_bits(followed) == as_bits(replaced) == as_bits(state)
    found = optax_mp.master_params(converted, given)
    assert as_bits(found) == as_bits(masters)
    pure = plain_tree(params), plain_tree(state)
    want = optax_mp.convert_opt_state(*pure[::-1], MASTERS, to_tx)
    assert as_bits(converted) == as_bits(want)
    # A state that was made without variables stays so.
    kept = optax_mp.convert_opt_state(pure[1], given, MASTERS, to_tx)
    assert jax.tree.structure(kept) == jax.tree.structure(want)


def plain_tree(tree):
    """Return a tree without NNX's variables."""
    return jax.tree.map(
        lambda x: x[...] if isinstance(x, nnx.Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
