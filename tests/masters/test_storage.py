"""Storages of a user's own, in every function; and what is refused as no storage."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from own_storages import Coarse, Negated, TwoBfloat16
from reference import rounded
from slow_cases import mostly_slow

import optax_mp

PARAMS = {
    "w": jnp.linspace(-2, 2, 12).reshape(3, 4).astype(jnp.bfloat16),
    "group": [jnp.ones(3, jnp.bfloat16), jnp.full((), 0.5, jnp.float16)],
    "norm": jnp.ones(2),
    "count": jnp.int32(3),
}
LOADED = jax.tree.map(
    lambda p: p * 1.1 + 0.01 if p.dtype != jnp.int32 else p,
    {**PARAMS, "w": PARAMS["w"].astype(jnp.float32)},
)
CAST = jax.tree.map(lambda x, p: x.astype(p.dtype), LOADED, PARAMS)
OWN = pytest.mark.parametrize("storage", [Negated(), TwoBfloat16()])
# For what takes long: the one that keeps a tree for each master.
MOSTLY_TREES = mostly_slow(
    "storage", [Negated(), TwoBfloat16()], lambda storage: storage == TwoBfloat16()
)
adam = optax.adam(1e-2)


def mixed(storage, inner=adam):
    return optax_mp.mixed_precision(inner, storage=storage, update_dtype=jnp.float32)


def gradients(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda p: (
            None
            if p.dtype == jnp.int32
            else jnp.asarray(rng.standard_normal(p.shape), jnp.float32)
        ),
        PARAMS,
    )


def as_kept(storage, master):
    """Return in NumPy what a storage makes of a master."""
    master = np.asarray(master, np.float32)
    if isinstance(storage, Negated):
        return master
    high = master.astype(ml_dtypes.bfloat16).astype(np.float32)
    low = (master - high).astype(ml_dtypes.bfloat16).astype(np.float32)
    return high + low


@OWN
def test_masters_follow_bare_optax_on_what_is_kept(storage):
    tx = mixed(storage, optax.sgd(0.125, momentum=0.5))
    bare = optax.sgd(0.125, momentum=0.5)
    masters = {"w": jnp.asarray(as_kept(storage, PARAMS["w"]))}
    bare_state = bare.init(masters)
    params, state = {"w": PARAMS["w"]}, tx.init({"w": PARAMS["w"]})
    update = jax.jit(tx.update)
    for i in range(4):
        grads = {"w": gradients(i)["w"]}
        changes, bare_state = bare.update(grads, bare_state, masters)
        moved = optax.apply_updates(masters, changes)
        masters = {"w": jnp.asarray(as_kept(storage, moved["w"]))}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found = optax_mp.master_params(state, params)
        assert as_bits(found) == as_bits(masters)
        want = rounded(np.asarray(masters["w"]), np.dtype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(np.asarray(params["w"], np.float32), want)


@MOSTLY_TREES
def test_states_keep_their_types_and_are_not_those_of_another_storage(storage):
    tx = mixed(storage)
    state, params = tx.init(PARAMS), PARAMS
    for i in range(2):
        updates, state = jax.jit(tx.update)(gradients(i), state, params)
        params = optax.apply_updates(params, {**updates, "count": jnp.int32(0)})
    assert state.storage == storage
    assert avals(state) == avals(tx.init(PARAMS))
    assert type(state) is type(mixed(dataclasses.replace(storage)).init(PARAMS))
    other = mixed(optax_mp.FullCopy()).init(PARAMS)
    assert jax.tree.structure(other) != jax.tree.structure(state)
    with pytest.raises(ValueError, match="got one made with FullCopy.*convert_opt"):
        tx.update(gradients(0), other, params)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(gradients(0), state, params)
        return (params, state), updates["w"]

    (_, scanned), _ = jax.lax.scan(body, (params, state), length=2)
    assert avals(scanned) == avals(state)


@MOSTLY_TREES
def test_masters_are_read_and_replaced(storage):
    tx = mixed(storage)
    state = tx.init(PARAMS)
    found = optax_mp.master_params(state, PARAMS)
    assert as_bits(found["w"]) == as_bits(PARAMS["w"].astype(jnp.float32))
    state = optax_mp.replace_master_params(state, CAST, LOADED)
    assert avals(state) == avals(tx.init(PARAMS))
    found = optax_mp.master_params(state, CAST)
    for path in ("w", "group"):
        want = jax.tree.map(lambda x: as_kept(storage, x), LOADED[path])
        assert as_bits(found[path]) == as_bits(want)


@pytest.mark.parametrize(
    ("storage", "other"),
    [(Negated(), optax_mp.Split(16)), (TwoBfloat16(), optax_mp.FullCopy())],
)
def test_a_run_is_converted_there_and_back(storage, other):
    params = {"w": PARAMS["w"]}
    grads = {"w": gradients(0)["w"]}
    own, another = mixed(storage), optax_mp.mixed_precision(adam, storage=other)
    updates, state = own.update(grads, own.init(params), params)
    params = optax.apply_updates(params, updates)
    there = optax_mp.convert_opt_state(state, params, own, another)
    assert there.storage == other
    masters = optax_mp.master_params(state, params)
    assert as_bits(optax_mp.master_params(there, params)) == as_bits(masters)
    back = optax_mp.convert_opt_state(there, params, another, own)
    assert as_bits(back) == as_bits(state) and avals(back) == avals(state)


def test_one_that_is_random_gets_a_key_for_each_step_and_param():
    """So it moves as float32 does, by updates of a tenth of what it can hold."""
    tx = mixed(Coarse(), optax.sgd(1.0))
    params = {name: jnp.ones(1024, jnp.bfloat16) for name in "ab"}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 0.1 / 256), params)
    state, moved = tx.init(params), []
    for i in range(40):
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert int(state.step_count) == i + 1
        found = optax_mp.master_params(state, params)
        moved.append(np.stack([1 - np.asarray(found[name]) for name in "ab"]))
    # Each of 2,048 masters takes 40 steps by 1 with probability 0.1: five deviations.
    assert abs(moved[-1].mean() * 256 - 4) < 5 * np.sqrt(40 * 0.1 * 0.9 / 2048)
    # At one step in one param, and in others, they are as unlike as steps can be.
    steps = np.diff(np.reshape(moved, (40, 2048)), axis=0)
    apart = np.abs(np.corrcoef(steps.reshape(-1, 1024)) - np.eye(78)).max()
    assert apart < 5.5 / np.sqrt(1024)
    assert avals(state) == avals(tx.init(params))


def test_reports_count_what_is_stored():
    for storage, dtypes in ((Negated(), {"float32"}), (TwoBfloat16(), {"bfloat16"})):
        params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        report = optax_mp.memory_report(mixed(storage).init(params), params)
        rows = [row for row in report.rows if row.role == "masters"]
        assert sum(row.bytes for row in rows) == 4 * 64 * 64
        assert {row.dtype for row in rows} == dtypes
        assert {row.param for row in rows} == {"['w']"}


# What is no storage.


def returning(value):
    return lambda self, *args: value(*args)


# What a storage has instead, and what is said when it is used.
WRONG = {
    "decode to a param": (
        {"decode": returning(lambda stored, param: param)},
        r"`decode` of the storage .* to return float32.*, got bfloat16\[3\]",
    ),
    "encode to another shape": (
        {"encode": returning(lambda master, param: (master, master.ravel()[:1]))},
        r"`encode` of the storage .* to return .*, got float32\[",
    ),
    "encode to a number": (
        {"encode": returning(lambda master, param: (master, 1.0))},
        "`encode` of the storage .* to return .*, got float",
    ),
    "encode to nothing": (
        {"encode": returning(lambda master, param: None)},
        "`encode` of the storage .* to return .*, got NoneType",
    ),
    "an integer target": (
        {"advance": returning(lambda _, param, master: (-master, master.astype(int)))},
        r"`advance` .* a floating target .* for param \['group'\]\[0\], .*, got ",
    ),
    "another state": (
        {"advance": returning(lambda _, param, master: ((master,) * 2, master))},
        r"`advance` of the storage .* to return .*, got float32\[3\], float32\[3\]",
    ),
    "another dtype": (
        {"takes": returning(lambda param, master: param == jnp.float16)},
        r"\['group'\]\[0\] .bfloat16\[3\]. to be float16 in training .*, got bfloat16",
    ),
    "no hash": (
        {"__hash__": None},
        "got .*, which has no `__hash__`; pass a frozen dataclass",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_no_storage_is_named_before_the_first_step(mistake):
    members, message = WRONG[mistake]
    with pytest.raises((TypeError, ValueError), match=message):
        mixed(type("Odd", (Negated,), members)()).init(PARAMS)


@pytest.mark.parametrize("missing", ["takes", "advance"])
def test_a_missing_method_is_named_at_construction(missing):
    names = {"takes", "encode", "decode", "advance"} - {missing}
    methods = {name: getattr(Negated(), name) for name in names}
    partial = types.SimpleNamespace(param_is_part=False, **methods)
    with pytest.raises(
        TypeError, match=f"expected `storage` .*, which has no `{missing}`"
    ):
        mixed(partial)
