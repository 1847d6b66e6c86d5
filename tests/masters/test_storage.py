"""Storages of a user's own, in every function; and what is refused as no storage."""

import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from own_storages import Negated, TwoBfloat16
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
OF_BFLOAT16 = {"w": PARAMS["w"]}
ALL = pytest.mark.parametrize(
    "storage", [optax_mp.FullCopy(), optax_mp.Split(8), Negated(), TwoBfloat16()]
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


def trained(tx, steps, params=PARAMS, state=None, jitted=True):
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update) if jitted else tx.update
    for i in steps:
        updates, state = update(gradients(i), state, params)
        updates = {**updates, "count": jnp.int32(0)}
        params = optax.apply_updates(params, updates)
    return params, state


def as_kept(storage, master):
    """Return in NumPy what a storage makes of a master."""
    master = np.asarray(master, np.float32)
    if isinstance(storage, Negated):
        return master
    high = master.astype(ml_dtypes.bfloat16).astype(np.float32)
    low = (master - high).astype(ml_dtypes.bfloat16).astype(np.float32)
    return high + low


@OWN
@pytest.mark.parametrize("jitted", [True, False])
def test_masters_follow_bare_optax_on_what_is_kept(storage, jitted):
    tx = mixed(storage, optax.sgd(0.125, momentum=0.5))
    bare = optax.sgd(0.125, momentum=0.5)
    masters = {"w": jnp.asarray(as_kept(storage, PARAMS["w"]))}
    bare_state = bare.init(masters)
    params, state = {"w": PARAMS["w"]}, tx.init({"w": PARAMS["w"]})
    update = jax.jit(tx.update) if jitted else tx.update
    for i in range(8):
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
    params, state = trained(tx, range(2))
    assert state.storage == storage
    assert avals(state) == avals(tx.init(PARAMS))
    assert type(state) is type(mixed(dataclasses.replace(storage)).init(PARAMS))
    other = mixed(optax_mp.FullCopy()).init(PARAMS)
    assert jax.tree.structure(other) != jax.tree.structure(state)
    with pytest.raises(ValueError, match="made with the storage FullCopy.*convert_opt"):
        tx.update(gradients(0), other, params)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(gradients(0), state, params)
        return (params, state), updates["w"]

    (_, scanned), _ = jax.lax.scan(body, (params, state), length=2)
    assert avals(scanned) == avals(state)


@OWN
def test_masters_are_read_and_replaced_in_any_nesting(storage):
    labels = {"w": "x", "group": "y", "norm": "y", "count": "y"}
    for tx in (
        mixed(storage),
        optax.MultiSteps(mixed(storage), 2),
        optax_mp.dynamic_loss_scale(mixed(storage)),
        optax.partition({"x": mixed(storage), "y": mixed(storage)}, labels),
    ):
        state = tx.init(PARAMS)
        found = optax_mp.master_params(state, PARAMS)
        assert as_bits(found["w"]) == as_bits(PARAMS["w"].astype(jnp.float32))
        state = optax_mp.replace_master_params(state, CAST, LOADED)
        assert avals(state) == avals(tx.init(PARAMS))
        found = optax_mp.master_params(state, CAST)
        for path in ("w", "group"):
            want = jax.tree.map(lambda x: as_kept(storage, x), LOADED[path])
            assert as_bits(found[path]) == as_bits(want)


@OWN
@pytest.mark.parametrize(
    "other", [optax_mp.FullCopy(), optax_mp.Split(16)], ids=["full", "split"]
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


def test_reports_count_what_is_stored():
    for storage, dtypes in ((Negated(), {"float32"}), (TwoBfloat16(), {"bfloat16"})):
        params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        report = optax_mp.memory_report(mixed(storage).init(params), params)
        rows = [row for row in report.rows if row.role == "masters"]
        assert sum(row.bytes for row in rows) == 4 * 64 * 64
        assert {row.dtype for row in rows} == dtypes
        assert {row.param for row in rows} == {"['w']"}


@OWN
def test_checkpoints_are_checked_and_pickled(storage):
    tx = mixed(storage)
    params, state = trained(tx, range(3))
    template = jax.eval_shape(tx.init, PARAMS)
    optax_mp.check_checkpoint(state, template)
    restored = pickle.loads(pickle.dumps(state))
    assert restored.storage == storage and as_bits(restored) == as_bits(state)
    assert avals(restored) == avals(state)
    a, b = (trained(tx, range(3, 6), params, x) for x in (state, restored))
    assert as_bits(a) == as_bits(b)
    split = jax.eval_shape(mixed(optax_mp.Split(16)).init, PARAMS)
    with pytest.raises(ValueError, match="does not match `template`"):
        optax_mp.check_checkpoint(state, split)


@ALL
def test_optax_finds_states_by_the_name_of_their_type(storage):
    state = (optax.EmptyState(), mixed(storage).init(OF_BFLOAT16))
    found = optax.tree_utils.tree_get(state, "MixedPrecisionState")
    assert found is state[1]
    assert repr(found).startswith(f"MixedPrecisionState[{storage}](master_params=")


# What is no storage.


@pytest.mark.parametrize("missing", ["takes", "encode", "decode", "advance"])
def test_a_missing_method_is_named_at_construction(missing):
    names = {"takes", "encode", "decode", "advance"} - {missing}
    own = Negated()
    partial = types.SimpleNamespace(
        param_is_part=False, **{name: getattr(own, name) for name in names}
    )
    with pytest.raises(TypeError, match=f"which has no `{missing}`; expected a stor"):
        mixed(partial)


def test_a_storage_that_is_not_hashable_is_refused():
    class Loose(Negated):
        __hash__ = None

    with pytest.raises(TypeError, match="is not hashable; expected a frozen dataclass"):
        mixed(Loose())


def test_what_decode_returns_is_checked_at_init():
    class Narrow(Negated):
        def decode(self, stored, param):
            return param

    message = r"`decode` of the storage .* returned bfloat16\[3\] .*expected float32"
    with pytest.raises(TypeError, match=message):
        mixed(Narrow()).init(PARAMS)


# Read by `decode` below; each is what `encode` returns for a master.
NOT_STORED = {
    r"float32\[\]": lambda master: (master, jnp.float32(1)),
    "float": lambda master: (master, 1.0),
    r"float32\[12\]": lambda master: (master, master.reshape(-1)),
    "NoneType": lambda master: None,
    "MaskedNode": lambda master: optax.MaskedNode(),
}


@pytest.mark.parametrize("shown", NOT_STORED)
def test_what_encode_returns_is_checked_at_init(shown):
    class Odd(Negated):
        def encode(self, master, param):
            return NOT_STORED[shown](master)

    with pytest.raises(TypeError, match=f"`encode` of the storage .* returned {shown}"):
        mixed(Odd()).init({"w": PARAMS["w"]})


@pytest.mark.parametrize(
    "of_target", [jnp.sum, lambda master: master.astype(jnp.int32)]
)
def test_the_target_of_advance_is_checked(of_target):
    class Astray(Negated):
        def advance(self, stored, param, master):
            return -master, of_target(master)

    message = r"`advance` .* for param \['group'\]\[0\], .* as the target a floating"
    with pytest.raises(TypeError, match=message):
        mixed(Astray()).init(PARAMS)


def test_what_advance_returns_is_checked():
    class Widening(Negated):
        def advance(self, stored, param, master):
            return (master, master), master

    message = r"`advance` of the storage .* returned float32\[3\], float32\[3\] for"
    with pytest.raises(TypeError, match=message):
        mixed(Widening()).init(PARAMS)


def test_params_that_a_storage_does_not_take_are_named():
    class OfFloat16(Negated):
        def takes(self, param_dtype, master_dtype):
            return param_dtype == jnp.float16

    message = r"\['group'\]\[0\] is bfloat16\[3\], in training bfloat16, expected float"
    with pytest.raises(ValueError, match=message):
        mixed(OfFloat16()).init(PARAMS)
