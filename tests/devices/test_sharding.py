"""What `zero1` takes, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp

ADAMW = optax.adamw(1e-2)
PARAMS = {"w": jnp.ones((8, 4), jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)}


def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def test_a_mesh_without_the_axis_is_an_error():
    with pytest.raises(
        ValueError, match=r"`axis` to be .* of \{'data': 1\}.*, got 'dp'"
    ):
        optax_mp.zero1(ADAMW, mesh(), "dp")
    with pytest.raises(ValueError, match="`axis` to be an axis of .*, got .*'dp'"):
        optax_mp.zero1(ADAMW, mesh(), ("data", "dp"))
    for axes in ((), ("data", "data"), None):
        with pytest.raises(ValueError, match="`axis` to be an axis of .*, got "):
            optax_mp.zero1(ADAMW, mesh(), axes)
    with pytest.raises(ValueError, match=r"of `mesh`, which is a list of \{\}"):
        optax_mp.zero1(ADAMW, jax.devices(), "data")
    with pytest.raises(TypeError, match="zero1: expected `inner` .*, got a function"):
        optax_mp.zero1(optax.adamw, mesh(), "data")


def test_specs_that_do_not_fit_are_an_error():
    for specs, message in (
        ({"x": P()}, "`param_specs` to have the structure of the params, .*, got "),
        ("data", "`param_specs` to hold PartitionSpecs .*, got 'data'"),
        ({"w": P(None, None, "data"), "b": None}, r"\['w'\], which is bfloat16\[8,4\]"),
        ({"w": P("model"), "b": None}, r"'model'.*the mesh has \{'data': 1\}"),
    ):
        tx = optax_mp.zero1(ADAMW, mesh(), "data", param_specs=specs)
        with pytest.raises((ValueError, TypeError), match=message):
            tx.init(PARAMS)


def test_specs_may_be_a_prefix_and_shardings():
    for specs in (None, P(), {"w": P(), "b": None}, NamedSharding(mesh(), P())):
        tx = optax_mp.zero1(ADAMW, mesh(), "data", param_specs=specs)
        assert jax.tree.leaves(tx.init(PARAMS))[1].shape == (4,)


def test_a_state_of_other_params_is_an_error():
    tx = optax_mp.zero1(optax_mp.mixed_precision(ADAMW), mesh(), "data")
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="same structure"):
        tx.update({"w": PARAMS["w"]}, state, PARAMS)


def test_extra_arguments_reach_the_optimizer():
    bare = optax_mp.mixed_precision(optax.polyak_sgd())
    tx = optax_mp.zero1(bare, mesh(), "data")
    ours, theirs = (
        jax.jit(each.update)(PARAMS, each.init(PARAMS), PARAMS, value=2.0)
        for each in (tx, bare)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_python_numbers_pass():
    params = {"w": jnp.ones((8, 4), jnp.bfloat16), "t": 1.5, "n": 3}
    bare = optax_mp.mixed_precision(ADAMW)
    state = optax_mp.zero1(bare, mesh(), "data").init(params)
    assert jax.tree.structure(state) == jax.tree.structure(bare.init(params))
