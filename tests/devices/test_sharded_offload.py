"""`offload` with sharded arrays."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from communication import sent_by
from comparison import as_bits
from host_memory import HOST, UNFUSED, in_chunks, kinds, masters, needs_memories, scaled
from jax.sharding import NamedSharding, PartitionSpec
from sharded_arrays import arrays, compact, mesh_of, shardings
from steps import by_update

import optax_mp

pytestmark = [needs_memories, pytest.mark.slow]


FORMS = {"masters": masters, "compact": compact, "scaled": lambda: scaled(masters())}


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


def check(mesh, knows_layout):
    placed = shardings(mesh)
    params, grads = (jax.device_put(arrays(i), placed) for i in (0, 1))
    for make in FORMS.values():
        tx = in_chunks(make(), param_shardings=placed if knows_layout else None)
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


@pytest.mark.parametrize("known", ["by settings", "nothing", "by types"])
def test_sharded_state_is_where_it_is_without(known):
    mesh = mesh_of("Explicit" if known == "by types" else "Auto")
    with jax.set_mesh(mesh) if known == "by types" else contextlib.nullcontext():
        check(mesh, knows_layout=known == "by settings")


def test_in_shard_map():
    mesh = mesh_of("Auto")
    rows = NamedSharding(mesh, PartitionSpec("a"))
    # Two leaves: XLA makes a division by a number that is used once a product.
    params, grads = (
        {k: jax.device_put(arrays(i)[k], rows) for k in ("rows", "both")}
        for i in (0, 1)
    )
    tx, plain = in_chunks(masters()), masters()
    state = tx.init(params)
    spec = jax.tree.map(
        lambda x: PartitionSpec("a") if x.ndim else PartitionSpec(), state
    )
    params_spec = jax.tree.map(lambda x: PartitionSpec("a"), params)
    update = jax.shard_map(
        tx.update,
        mesh=mesh,
        in_specs=(params_spec, spec, params_spec),
        out_specs=(params_spec, spec),
        check_vma=False,
    )
    options = {"compiler_options": UNFUSED}
    updates, new = jax.jit(update, **options)(grads, state, params)
    want = jax.jit(plain.update, **options)(grads, plain.init(params), params)
    assert as_bits((updates, new)) == as_bits(want)
    assert kinds(new) == {"Host", "Device"}


def test_zero1_inside_and_around():
    mesh = mesh_of("Auto")
    params, grads = (
        jax.device_put(arrays(i), NamedSharding(mesh, PartitionSpec())) for i in (0, 1)
    )
    want = on_one_device(masters())
    for tx, by_chunks in (
        (in_chunks(optax_mp.zero1(masters(), mesh, ("a", "b"))), False),
        (optax_mp.zero1(in_chunks(masters()), mesh, ("a", "b")), True),
    ):
        state = tx.init(params)
        program = str(jax.make_jaxpr(tx.update)(grads, state, params))
        # Each device takes the chunks of its share.
        assert (program.count("shard_map[") == len(params)) == by_chunks
        assert kinds(state) == {"Host", "Device"}
        parts = [x.addressable_shards[0].data for x in jax.tree.leaves(state)]
        whole = [x for x in jax.tree.leaves(state)]
        assert sum(x.size for x in parts) < 0.2 * sum(x.size for x in whole)
        copies = jax.tree.map(jnp.copy, params)
        got, _ = steps(tx, copies, state, grads)
        assert as_bits(got) == as_bits(want)
        assert kinds(got[1]) == {"Host", "Device"}
