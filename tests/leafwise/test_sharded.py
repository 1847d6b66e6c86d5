"""take_step on sharded arrays: the bits of one device, and no collective."""

import jax
import jax.numpy as jnp
import optax
import pytest
from forced_devices import run_checks
from jax.sharding import NamedSharding, PartitionSpec
from sharded_steps import CHECKS

import optax_mp


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="before JAX 0.6")
@pytest.mark.slow
def test_a_step_on_eight_devices():
    run_checks("sharded_steps", 8, CHECKS)


def test_shardings_that_do_not_fit_are_named():
    mesh = jax.make_mesh((1,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params = {"w": jnp.ones((4, 4))}
    tx = optax.adam(1e-3)
    state = tx.init(params)
    with pytest.raises(ValueError, match="`param_shardings` has the structure"):
        optax_mp.take_step(tx, params, state, params, param_shardings={"v": rows})
    with pytest.raises(TypeError, match="`param_shardings` holds P"):
        optax_mp.take_step(
            tx, params, state, params, param_shardings=PartitionSpec("data")
        )
    for fitting in (rows, {"w": rows}, jax.tree.map(lambda p: p.sharding, params)):
        optax_mp.take_step(tx, params, state, params, param_shardings=fitting)
