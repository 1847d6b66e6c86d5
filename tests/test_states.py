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
    LossScaleState,
    MixedPrecisionState,
    Split,
    dynamic_loss_scale,
    low_bit_state,
    mixed_precision,
    stochastic_rounding,
)
from optax_mp._states import find_owners, find_states, map_states
from optax_mp.compact import LowBitState, Quantized


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
pytestmark = [
    # optax's own: optimistic_adam and dpsgd announce what they replace.
    pytest.mark.filterwarnings("ignore:.*optimistic_adam_v2.*"),
    pytest.mark.filterwarnings('ignore:"seed" is deprecated'),
]
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


# By default a few in the form with the most states, and one in every form.
@mostly_slow(
    ("name", "wrapper"),
    itertools.product([*OPTIMIZERS, *OTHERS], WRAPPERS),
    lambda name, wrapper: (
        name == "adamw" or (wrapper == "compact" and name in A_FEW | set(OTHERS))
    ),
)
def test_owners_do_not_depend_on_the_container_of_the_params(name, wrapper):
    tx = WRAPPERS[wrapper]((OPTIMIZERS | OTHERS)[name]())
    state, expected = owners_of(tx, dict(zip(NAMES, ARRAYS, strict=True)))
    assert expected == owners_by_name(state)
    for container, make in CONTAINERS.items():
        state, found = owners_of(tx, make(ARRAYS))
        assert found == expected, (container, jax.tree.structure(state))


@mostly_slow(
    ("name", "wrapper"),
    itertools.product([*OPTIMIZERS, *OTHERS], ["bare", "compact"]),
    lambda name, wrapper: wrapper == "compact" and name in A_FEW | set(OTHERS),
)
def test_a_bare_array_owns_what_has_its_shape(name, wrapper):
    tx = WRAPPERS[wrapper]((OPTIMIZERS | OTHERS)[name]())
    _, in_dict = owners_of(tx, {"p0": ARRAYS[1]})
    state, found = owners_of(tx, ARRAYS[1])
    leaves = tree_flatten_with_path(state)[0]
    for (path, leaf), owner, expected in zip(leaves, found, in_dict, strict=True):
        of_shape = leaf.shape[-2:] == ARRAYS[1].shape or ".scales" in keystr(path)
        assert owner == (expected if of_shape else None), keystr(path)


def test_params_own_themselves():
    for make in [*CONTAINERS.values(), lambda x: x[0]]:
        params = make(ARRAYS)
        count = len(jax.tree.leaves(params))
        assert find_owners(params, params) == list(range(count))


def test_no_leaves_have_no_owners():
    assert find_owners({}, {"w": jnp.ones(2)}) == []
    assert find_owners({"w": jnp.ones(2), "n": 1}, {}) == [None, None]


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


def nested_state():
    tx = optax.chain(
        optax.identity(),
        dynamic_loss_scale(
            mixed_precision(low_bit_state(optax.adam(1e-3), min_size=1))
        ),
    )
    return tx.init({"w": ARRAYS[0]})


def reference_find(node, kind):
    """Every node of a kind, outermost first, by plain recursion."""
    found = [node] if isinstance(node, kind) else []
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, (tuple, list)) and not isinstance(node, Quantized):
        for child in node:
            found += reference_find(child, kind)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        MixedPrecisionState,
        Quantized,
        (LossScaleState, LowBitState),
        optax.ScaleByAdamState,
        optax.EmptyState,
    ],
)
def test_states_are_found_at_any_depth(kind):
    state = {"one": nested_state(), "two": [nested_state()]}
    found = find_states(state, kind)
    expected = reference_find(state, kind)
    assert [id(node) for _, node in found] == [id(node) for node in expected]
    for path, node in found:
        assert eval(f"state{keystr(path)}", {"state": state}) is node


def test_a_state_within_one_of_its_own_kind_is_found():
    state = mixed_precision(mixed_precision(optax.sgd(0.1))).init({"w": ARRAYS[0]})
    found = find_states((state,), MixedPrecisionState)
    assert [keystr(path) for path, _ in found] == ["[0]", "[0].inner_state"]


def test_nothing_is_found_where_nothing_is():
    assert find_states(optax.adam(1e-3).init(ARRAYS[0]), MixedPrecisionState) == []
    assert find_states((), MixedPrecisionState) == []


def test_map_replaces_inner_states_first():
    seen = []

    def unwrap(node):
        seen.append(type(node).__name__.split("[")[0])
        return node.inner_state

    kinds = (LossScaleState, MixedPrecisionState, LowBitState)
    bare = map_states(unwrap, nested_state(), kinds)
    assert seen == ["LowBitState", "MixedPrecisionState", "LossScaleState"]
    assert type(bare[1][0]) is optax.ScaleByAdamState
    assert find_states(bare, kinds) == []


def test_map_without_a_change_gives_the_same_tree():
    state = nested_state()
    same = map_states(lambda node: node, state, (LossScaleState, Quantized))
    assert jax.tree.structure(same) == jax.tree.structure(state)
    pairs = zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True)
    assert all(a is b for a, b in pairs)
