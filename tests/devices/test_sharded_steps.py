"""A step of the compact form on sharded arrays: the bits of one device."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest
from comparison import as_bits
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded_arrays import arrays, compact, mesh_of, shardings
from slow_cases import mostly_slow
from steps import by_update, take_steps

import optax_mp

pytestmark = pytest.mark.usefixtures("no_long_constant_folding")


def within_a_jit(tx):
    """Return a step of which `jit` does not say how its arguments are sharded."""
    step = jax.jit(by_update(tx))
    return lambda *args: step(*args)


@mostly_slow(
    ("kind", "way"),
    [("Auto", by_update), ("Auto", within_a_jit), ("Explicit", by_update)],
    lambda kind, way: way is within_a_jit,
)
def test_bits_are_those_of_one_device(kind, way):
    mesh, tx = mesh_of(kind), compact()
    params, gradients = arrays(0), [arrays(1), arrays(2)]
    want = take_steps(tx, params, tx.init(params), gradients)
    with jax.set_mesh(mesh) if kind == "Explicit" else contextlib.nullcontext():
        placed = shardings(mesh)
        params, *gradients = (jax.device_put(x, placed) for x in (params, *gradients))
        state, step = tx.init(params), jax.jit(way(tx))
        for grads in gradients:
            params, state = step(params, state, grads)
    assert as_bits((params, state)) == as_bits(want)
    for name, param in params.items():
        assert param.sharding.is_equivalent_to(placed[name], param.ndim)


def test_a_leaf_that_is_equal_on_all_ranks_stays_so():
    """By its type, which `shard_map` compares with `out_specs`."""
    specs = {"a": P("i"), "b": P()}
    tx = optax_mp.low_bit_state(optax.adam(0.1))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def step(params):
        return by_update(tx)(params, tx.init(params), params)[0]

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=specs)
    jax.eval_shape(sharded, {"a": jnp.ones((1024, 256)), "b": jnp.ones((512, 256))})
