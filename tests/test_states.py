"""Finding and mapping states, and telling which param a leaf belongs to."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from jax.tree_util import DictKey, keystr, tree_flatten_with_path
from optimizers import A_FEW, OPTIMIZERS
from slow_cases import mostly_slow

from optax_mp import (
    MixedPrecisionState,
    Split,
    dynamic_loss_scale,
    low_bit_state,
    mixed_precision,
    stochastic_rounding,
)
from optax_mp.core.trees._states import find_owners


class Pair(NamedTuple):
    weight: Any
    # As a field of the state of many optimizers is called.
    count: Any


class Statistics(NamedTuple):
    mean: Any
    size: Any


ARRAYS = [
    jnp.linspace(-1, 1, 24).reshape(4, 6).astype(jnp.bfloat16),
    jnp.linspace(1, 2, 64 * 128).reshape(64, 128).astype(jnp.bfloat16),
    jnp.ones(6, jnp.bfloat16),
]
NAMES = ("p0", "p1", "p2")
# Every container keeps the arrays in the same order.
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "nested lists": lambda x: [[x[0], x[1]], [x[2]]],
    "nested": lambda x: {"a": [x[0], {"mu": x[1]}], "b": (x[2],)},
    "named": lambda x: Pair({"count": x[0], "mu": x[1]}, x[2]),
    "state's names": lambda x: {"count": x[0], "mu": x[1], "nu": x[2]},
}
pytestmark = pytest.mark.filterwarnings('ignore:"seed" is deprecated')
WRAPPERS = {
    "bare": lambda tx: tx,
    "masters": lambda tx: dynamic_loss_scale(mixed_precision(tx)),
    "compact": lambda tx: mixed_precision(low_bit_state(tx), storage=Split(8)),
    "chance": lambda tx: optax.chain(optax.identity(), stochastic_rounding(tx)),
    "accumulated": lambda tx: optax.MultiSteps(mixed_precision(tx), 2),
    "frozen": lambda tx: optax.masked(tx, lambda p: jax.tree.map(jnp.ndim, p)),
    "guarded": lambda tx: optax.apply_if_finite(optax.chain(tx, optax.identity()), 3),
}
OTHERS = {
    "momentum_in_chains": lambda: optax.chain(optax.chain(optax.trace(0.9))),
    "schedule": lambda: optax.scale_by_schedule(lambda count: 0.1 * count),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-3),
    "history": lambda: optax.scale_by_lbfgs(3),
    "fast": lambda: optax.contrib.schedule_free_sgd(0.1),
}
# Their states have trees of params within states of their own.
UNUSUAL = "galore", "mechanize", "sam", "sm3", "split_real_and_imaginary"
EVERY = {name: OPTIMIZERS[name] for name in (*sorted(A_FEW), *UNUSUAL)} | OTHERS


def owners_of(tx, params):
    state = jax.eval_shape(tx.init, params)
    return state, find_owners(state, params)


def owners_by_name(state):
    """The reference: params whose names occur nowhere else."""
    names = [DictKey(name) for name in NAMES]
    found = []
    for path, _ in tree_flatten_with_path(state)[0]:
        hits = [names.index(key) for key in path if key in names]
        found.append(hits[0] if hits else None)
    return found


@mostly_slow(
    ("name", "wrapper"),
    # Every structure in the form with the most states, and one in every form.
    dict.fromkeys(
        [*itertools.product(["adamw"], WRAPPERS), *((x, "compact") for x in EVERY)]
    ),
    lambda name, wrapper: name not in UNUSUAL,
)
def test_owners_do_not_depend_on_the_container_of_the_params(name, wrapper):
    tx = WRAPPERS[wrapper](EVERY[name]())
    state, expected = owners_of(tx, dict(zip(NAMES, ARRAYS, strict=True)))
    assert expected == owners_by_name(state)
    for container, make in CONTAINERS.items():
        state, found = owners_of(tx, make(ARRAYS))
        assert found == expected, (container, jax.tree.structure(state))


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "momentum_in_chains"])
@pytest.mark.parametrize("first", [(4, 6), (6,), ()])
def test_owners_if_the_params_are_a_tuple_as_long_as_a_chain(name, first):
    tx = (OPTIMIZERS | OTHERS)[name]()
    for count in range(1, 5):
        arrays = [jnp.ones(shape) for shape in [first, *[(4, 6)] * (count - 1)]]
        state, expected = owners_of(tx, {f"p{i}": x for i, x in enumerate(arrays)})
        if expected == owners_by_name(state):
            _, found = owners_of(tx, tuple(arrays))
            assert found == expected, (count, jax.tree.structure(state))


def test_owners_if_links_of_a_chain_are_called_like_params():
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    tx = optax.named_chain(("a", optax.trace(0.9)), ("b", optax.trace(0.9)))
    assert owners_of(tx, params)[1] == [0, 1, 0, 1]


@pytest.mark.parametrize("name", [*sorted(A_FEW), *OTHERS])
def test_a_bare_array_owns_what_has_its_shape(name):
    tx = WRAPPERS["compact"](EVERY[name]())
    _, in_dict = owners_of(tx, {"p0": ARRAYS[1]})
    state, found = owners_of(tx, ARRAYS[1])
    leaves = tree_flatten_with_path(state)[0]
    for (path, leaf), owner, expected in zip(leaves, found, in_dict, strict=True):
        of_shape = leaf.shape[-2:] == ARRAYS[1].shape
        of_shape |= ".scales" in keystr(path)
        assert owner == (expected if of_shape else None), keystr(path)


def test_owners_of_small_trees_in_the_place_of_a_param():
    params = {"a": jnp.ones(3), "b": [jnp.ones((2, 2))]}
    statistics = Statistics(jnp.ones(3), jnp.ones(()))
    pair = [jnp.ones(2), jnp.ones(2)]
    count = optax.ScaleByScheduleState(jnp.int32(0))
    state = (count, {"of": {"a": statistics, "b": [pair]}})
    assert find_owners(state, params) == [None, 0, 0, 1, 1]


def test_owners_of_stored_masters_that_are_small_trees():
    params = [jnp.ones(3), {"w": jnp.ones((2, 2))}]
    stored = [
        {"parts": (jnp.ones(3), jnp.ones(3))},
        {"w": (jnp.ones((2, 2)), [jnp.ones((3, 2, 2))])},
    ]
    state = MixedPrecisionState(stored, (optax.ScaleByScheduleState(jnp.int32(0)),))
    assert find_owners((state,), params) == [0, 0, 1, 1, None]
    state = MixedPrecisionState({"high": params[0], "low": params[0]}, ())
    assert find_owners(state, params[0]) == [0, 0]
