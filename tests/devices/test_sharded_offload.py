"""`offload` with sharded arrays."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from communication import sent_by
from comparison import as_bits
from hosted_steps import (
    ADAMW,
    HOST,
    UNFUSED,
    hosted,
    kinds,
    masters,
    needs_memories,
    scaled,
)
from jax.sharding import NamedSharding, PartitionSpec
from sharded_arrays import arrays, compact, mesh_of, shardings
from steps import by_update

import optax_mp

pytestmark = [needs_memories, pytest.mark.slow]


def split():
    return optax_mp.mixed_precision(ADAMW, storage=optax_mp.Split(8))


FORMS = [masters, split, compact, lambda: scaled(masters())]


def steps(tx, params, state, grads):
    """Return params and state after three steps, and the program of one."""
    options = {"donate_argnums": (0, 1), "compiler_options": UNFUSED}
    compiled = jax.jit(by_update(tx), **options)
    sent = sent_by(compiled.lower(params, state, grads).compile())
    for _ in range(3):
        params, state = compiled(params, state, grads)
    return (params, state), {kind for kind, _, _ in sent}


def on_one_device(tx):
    params, grads = arrays(0), arrays(1)
    return steps(tx, params, tx.init(params), grads)[0]


def assert_placed_like(state, plain):
    """Assert that arrays are sharded as without `offload`, large ones on the host."""
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        kind = HOST if x.size >= 256 else y.sharding.memory_kind
        placement = y.sharding.with_memory_kind(kind)
        assert x.sharding.memory_kind == kind
        assert x.sharding.is_equivalent_to(placement, x.ndim), (x.sharding, placement)


def check(mesh):
    placed = shardings(mesh)
    params, grads = (jax.device_put(arrays(i), placed) for i in (0, 1))
    for make in FORMS:
        tx = hosted(make())
        state = tx.init(params)
        assert_placed_like(state, jax.jit(make().init)(params))
        copies = jax.tree.map(jnp.copy, params)
        got, collectives = steps(tx, copies, state, grads)
        assert kinds(got[1]) == {"Host", "Device"}
        assert as_bits(got) == as_bits(on_one_device(make()))
        plain = make()
        copies = jax.tree.map(jnp.copy, params)
        _, known = steps(plain, copies, plain.init(params), grads)
        assert collectives <= known, collectives


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_state_is_where_it_is_without(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh) if kind == "Explicit" else contextlib.nullcontext():
        check(mesh)


@pytest.mark.parametrize("make", [masters, split])
def test_in_shard_map(make):
    mesh = mesh_of("Auto")
    rows = NamedSharding(mesh, PartitionSpec("a"))
    # Two leaves: XLA makes a division by a number that is used once a product.
    params, grads = (
        {k: jax.device_put(arrays(i)[k], rows) for k in ("rows", "both")}
        for i in (0, 1)
    )
    tx, plain = hosted(make()), make()
    state = tx.init(params)
    spec = jax.tree.map(
        lambda x: PartitionSpec("a") if x.ndim else PartitionSpec(), state
    )
    params_spec = jax.tree.map(lambda x: PartitionSpec("a"), params)

    def update(tx, state):
        sharded = jax.shard_map(
            tx.update,
            mesh=mesh,
            in_specs=(params_spec, spec, params_spec),
            out_specs=(params_spec, spec),
        )
        return jax.jit(sharded, compiler_options=UNFUSED)(grads, state, params)

    updates, new = update(tx, state)
    assert as_bits((updates, new)) == as_bits(update(plain, plain.init(params)))
    assert kinds(new) == {"Host", "Device"}


def test_zero1_inside_and_around():
    mesh = mesh_of("Auto")
    params, grads = (
        jax.device_put(arrays(i), NamedSharding(mesh, PartitionSpec())) for i in (0, 1)
    )
    want = on_one_device(masters())
    for tx in (
        hosted(optax_mp.zero1(masters(), mesh, ("a", "b"))),
        optax_mp.zero1(hosted(masters()), mesh, ("a", "b")),
    ):
        state = tx.init(params)
        assert kinds(state) == {"Host", "Device"}
        parts = [x.addressable_shards[0].data for x in jax.tree.leaves(state)]
        whole = [x for x in jax.tree.leaves(state)]
        assert sum(x.size for x in parts) < 0.2 * sum(x.size for x in whole)
        copies = jax.tree.map(jnp.copy, params)
        got, _ = steps(tx, copies, state, grads)
        assert as_bits(got) == as_bits(want)
        assert kinds(got[1]) == {"Host", "Device"}
