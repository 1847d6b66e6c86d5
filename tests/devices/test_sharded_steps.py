"""What a step is under `shard_map`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from steps import by_update

import optax_mp

pytestmark = pytest.mark.usefixtures("no_long_constant_folding")


def test_a_leaf_that_is_equal_on_all_ranks_stays_so():
    """By its type, which `shard_map` compares with `out_specs`."""
    specs = {"a": P("i"), "b": P()}
    tx = optax_mp.low_bit_state(optax.adam(0.1))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def step(params):
        return by_update(tx)(params, tx.init(params), params)[0]

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=specs)
    jax.eval_shape(sharded, {"a": jnp.ones((1024, 256)), "b": jnp.ones((512, 256))})
