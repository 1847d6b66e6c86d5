"""Loss scaling over four devices, in `shard_map` and of sharded arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from communication import sent_by
from comparison import as_bits
from jax import shard_map
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp

pytestmark = pytest.mark.slow

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
PARAMS = {"w": jnp.ones(8, jnp.float16), "norm": jnp.ones(2)}


def transform(axis_name=None):
    inner = optax_mp.mixed_precision(optax.adamw(1e-2))
    return optax_mp.dynamic_loss_scale(inner, init_scale=8.0, axis_name=axis_name)


def gradients(bad_rank=None):
    """Return one gradient for each rank, along a leading axis."""
    grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS)
    if bad_rank is not None:
        grads["norm"] = grads["norm"].at[bad_rank, 1].set(jnp.inf)
    return grads


def update_on_each_rank(tx):
    """Return a step in which each rank has its own gradient of replicated params."""

    def step(grads, state, params):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return jax.tree.map(lambda x: x[None], (updates, state))

    specs = P("data"), P(), P()
    return jax.jit(shard_map(step, mesh=MESH, in_specs=specs, out_specs=P("data")))


def test_an_inf_on_one_rank_makes_all_skip_and_all_name_the_first_leaf():
    tx = transform("data")
    state = tx.init(PARAMS)
    step = update_on_each_rank(tx)
    grads = gradients()
    grads["w"] = grads["w"].at[1, 0].set(jnp.nan)
    _, after = step(grads, state, PARAMS)
    np.testing.assert_array_equal(after.nonfinite_index, [1] * 4)
    grads["norm"] = grads["norm"].at[3, 1].set(jnp.inf)
    updates, after = step(grads, state, PARAMS)
    np.testing.assert_array_equal(after.nonfinite_index, [0] * 4)
    np.testing.assert_array_equal(after.scale, [4.0] * 4)
    np.testing.assert_array_equal(after.total_skipped_count, [1] * 4)
    for rank in range(4):
        own = jax.tree.map(lambda x, rank=rank: np.asarray(x)[rank], after)
        assert as_bits(own.inner_state) == as_bits(state.inner_state)
    assert all((np.asarray(u) == 0).all() for u in jax.tree.leaves(updates))


def test_ranks_agree_by_one_collective_of_one_scalar():
    tx = transform("data")
    state = tx.init(PARAMS)
    step = update_on_each_rank(tx)
    sent = sent_by(step.lower(gradients(), state, PARAMS).compile())
    assert sent == [("all-reduce", "s32", 1)]


def test_sharded_gradients_under_jit_need_nothing():
    tx = transform()
    sharding = {"w": NamedSharding(MESH, P("data")), "norm": NamedSharding(MESH, P())}
    params = jax.device_put(PARAMS, sharding)
    state = tx.init(params)
    grads = jax.device_put(
        {"w": jnp.ones(8).at[5].set(jnp.nan), "norm": jnp.ones(2)}, sharding
    )
    updates, after = jax.jit(tx.update)(grads, state, params)
    assert as_bits(after.inner_state) == as_bits(state.inner_state)
    assert float(after.scale) == 4.0 and int(after.nonfinite_index) == 1
    assert float(jax.jit(optax_mp.loss_scale)(after)) == 4.0
    masters = after.inner_state.master_params["w"]
    assert masters.sharding.is_equivalent_to(sharding["w"], 1)
    assert updates["w"].sharding.is_equivalent_to(sharding["w"], 1)


def test_sharded_params_in_shard_map_skip_together():
    """Each rank holds a part of the params, and only one of them sees the overflow."""
    tx = transform("data")
    params = {"w": jnp.ones(8, jnp.float16)}
    state = tx.init(params)
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), state)
    step = jax.jit(
        shard_map(
            tx.update,
            mesh=MESH,
            in_specs=(P("data"), specs, P("data")),
            out_specs=(P("data"), specs),
        )
    )
    _, after = step({"w": jnp.ones(8).at[0].set(jnp.inf)}, state, params)
    assert as_bits(after.inner_state) == as_bits(state.inner_state)
    assert float(after.scale) == 4.0
    updates, after = step({"w": jnp.ones(8)}, state, params)
    plain, _ = jax.jit(transform().update)({"w": jnp.ones(8)}, state, params)
    np.testing.assert_array_equal(updates["w"], plain["w"])


def test_a_link_before_mixed_precision_holds_on_averaged_gradients():
    tx = optax.chain(
        optax_mp.dynamic_loss_scale(init_scale=8.0),
        optax_mp.mixed_precision(optax.adamw(1e-2)),
    )
    state = tx.init(PARAMS)

    def step(grads, state, params):
        grads = jax.tree.map(lambda g: jax.lax.pmean(g[0], "data"), grads)
        return tx.update(grads, state, params)

    step = jax.jit(
        shard_map(step, mesh=MESH, in_specs=(P("data"), P(), P()), out_specs=(P(), P()))
    )
    _, after = step(gradients(bad_rank=1), state, PARAMS)
    assert as_bits(after[1]) == as_bits(state[1])
    assert float(after[0].scale) == 4.0


def test_explicitly_sharded_arrays_work():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=explicit)
    with jax.set_mesh(mesh):
        sharding = {
            "w": NamedSharding(mesh, P("data")),
            "norm": NamedSharding(mesh, P()),
        }
        params = jax.device_put(PARAMS, sharding)
        grads = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        bad = grads | {"norm": grads["norm"] * jnp.nan}
        masters = optax_mp.mixed_precision(optax.adamw(1e-2))
        link = optax_mp.dynamic_loss_scale(init_scale=8.0)
        for tx in (transform(), optax.chain(link, masters)):
            state = jax.jit(tx.init)(params)
            updates, after = jax.jit(tx.update)(grads, state, params)
            assert updates["w"].sharding == sharding["w"]
            _, held = jax.jit(tx.update)(bad, after, params)
            count = optax.tree.get_all_with_path(held, "count")
            assert [int(x) for _, x in count] == [1]
