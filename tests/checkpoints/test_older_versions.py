"""States of version 1.0.0: they load, on other devices as well, and go on."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import as_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_map_with_path
from saved_states import NAMES, load, names_of
from slow_cases import mostly_slow
from steps import by_update
from trained_forms import FORMS, template_of

import optax_mp

# Arrays that later versions have: of zeros, they say what 1.0.0 did.
NEW = ".shifts", ".dropped_count"
FILE = pathlib.Path(__file__).parent / "data" / "1.0.0.npz"


def restore(name):
    """Return params and state of a form, in the containers of today's code."""
    saved, template = load(FILE, name, "run"), template_of(name)
    optax_mp.check_checkpoint(fill(template, saved, wrap=lambda x: x), template)
    missing = names_of(template).keys() - saved.keys()
    assert saved.keys() <= names_of(template).keys()
    assert all(name.endswith(NEW) for name in missing)
    return fill(template, saved, wrap=jax.random.wrap_key_data)


def fill(template, saved, wrap):
    def value(path, like):
        if (name := keystr(path)) not in saved and name.endswith(NEW):
            return jnp.zeros(like.shape, like.dtype)
        is_key = jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key)
        return (wrap if is_key else jnp.asarray)(saved[name])

    return tree_map_with_path(value, template)


def on_mesh(name, run):
    """Return a run on eight devices, its rows over four and its columns over two."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = {"w": P("a", "b"), "norm": P(), "frozen": P(None, "a")}
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    of_state = optax_mp.state_shardings(FORMS[name], run[0], shardings)
    return jax.device_put(run, (shardings, of_state))


def loss(params, x):
    return jnp.mean((x @ params["w"].astype(x.dtype)) ** 2) + params["norm"].sum()


@functools.partial(jax.jit, static_argnums=0)
def forward_and_step(name, params, state):
    x = jnp.ones((4, 16), jnp.float32)
    value, grads = optax_mp.value_and_grad(loss)(state, params, x)
    params, state = by_update(FORMS[name])(params, state, grads)
    return value, optax_mp.master_params(state, params), state


@mostly_slow("name", NAMES, {"scaled 5.1 bytes", "split 16"}.__contains__)
@pytest.mark.filterwarnings("ignore::optax_mp.MixedPrecisionWarning")
def test_a_state_of_1_0_0_is_read_and_takes_its_first_step_on_another_mesh(name):
    params, state = run = restore(name)
    masters = names_of(optax_mp.master_params(state, params))
    assert as_bits(masters) == as_bits(load(FILE, name, "masters"))
    value, masters, after = forward_and_step(name, *run)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    there = forward_and_step(name, *on_mesh(name, run))
    np.testing.assert_allclose(there[0], value, rtol=1e-5)
    moved = jax.tree.map(jnp.subtract, there[1], masters)
    # A sum in another order may move a code to the next one.
    assert all(float(abs(x).max()) < 1e-3 for x in jax.tree.leaves(moved))
