"""What `metrics` says of a scale at its floor, of a bad loss, and of a sharded state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optax_mp


def test_an_overflow_at_the_floor_is_told_until_the_scale_grows():
    tx = optax_mp.dynamic_loss_scale(
        optax.sgd(0.1), init_scale=2.0, min_scale=2.0, growth_interval=1
    )
    params = {"w": jnp.ones(2)}
    state, told = tx.init(params), []
    for grad in (1.0, jnp.inf, 1.0):
        state = tx.update({"w": jnp.full(2, grad)}, state, params)[1]
        told.append(bool(optax_mp.metrics(state)["at_min_scale"]))
        state = state._replace(scale=jnp.float32(2.0))
    assert told == [False, True, False]


def test_metrics_say_whether_the_loss_or_the_scale_made_a_step_skip():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
    params, bad = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.nan])}
    state, told = tx.init(params), []
    for value in (jnp.nan, 1.0, None):
        state = tx.update(bad, state, params, value=value)[1]
        found = jax.jit(optax_mp.metrics)(state)
        told.append((bool(found["skipped_by_loss"]), float(found["loss_scale"])))
    assert told == [(True, 2.0**16), (False, 2.0**15), (False, 2.0**14)]


def test_metrics_of_sharded_masters_under_jit():
    sharding = NamedSharding(Mesh(jax.devices()[:4], "data"), PartitionSpec("data"))
    params = jax.device_put({"w": jnp.ones(8, jnp.float16)}, sharding)
    masters = optax_mp.mixed_precision(optax.adamw(1e-2))
    tx = optax_mp.dynamic_loss_scale(masters, init_scale=8.0)
    grads = jax.device_put({"w": jnp.ones(8).at[5].set(np.nan)}, sharding)
    state = jax.jit(tx.update)(grads, tx.init(params), params)[1]
    found = jax.jit(optax_mp.metrics)(state)
    assert float(found["loss_scale"]) == 4.0 and int(found["step_count"]) == 0
