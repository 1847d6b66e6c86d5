"""What is known of JAX: learned whatever its names are, and off with a warning if not."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_mp
from optax_mp.core.jax_api import _contact
from optax_mp.core.jax_api._contact import is_traced_by_jit

X = jax.ShapeDtypeStruct((2,), "float32")


NAMES = vars(_contact)


def forget():
    for fact in NAMES.values():
        getattr(getattr(fact, "is_known", fact), "cache_clear", int)()


@pytest.fixture
def fresh():
    """Learn everything anew, before a test and after it."""
    forget()
    yield
    forget()


def kinds_in(function):
    found = []

    def note(x):
        found.append(is_traced_by_jit(x))
        return x

    jax.eval_shape(function(note), X)
    return found


def varies():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    found = []

    def note():
        found.append(bool(_contact.varying_axes(lax.axis_index("i"))))
        found.append(bool(_contact.varying_axes(jnp.zeros(()))))
        return jnp.zeros(1)

    spec = PartitionSpec("i")
    jax.eval_shape(jax.shard_map(note, mesh=mesh, in_specs=(), out_specs=spec))
    return found


# What is asked, the answer, that without the fact, and how JAX changes.
FACTS = {
    "is_traced_by_jit": (
        lambda: [*kinds_in(lambda f: f), *kinds_in(jax.vmap)],
        ([True, False], [False, False]),
        (jax, "vmap", lambda f: f),
    ),
    "varying_axes": (
        varies,
        ([True, False], [False, False]),
        (_contact, "_VARYING", ("renamed",)),
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_what_jax_renames_is_off_with_one_warning(name, fresh, monkeypatch):
    ask, (answer, without), change = FACTS[name]
    assert ask() == answer
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(*change)
        with pytest.warns(optax_mp.MixedPrecisionWarning, match=f"JAX .* as `{name}`"):
            assert not NAMES[name].is_known()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask() == without


def test_all_facts_are_tested_above():
    assert {name for name, x in NAMES.items() if hasattr(x, "is_known")} == set(FACTS)


@pytest.fixture
def renamed(fresh):
    """Give the class of what `jit` traces another name."""
    kind = _contact._class_in_jit()
    name, kind.__name__ = kind.__name__, "Renamed"
    forget()
    yield
    kind.__name__ = name


def test_a_class_may_have_any_name(renamed):
    """A state that `jit` makes is sharded like its params, as with the old name."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    placed = NamedSharding(mesh, PartitionSpec("i"))
    params = jax.device_put(jnp.ones((8, 8)), placed)
    state = jax.jit(optax_mp.mixed_precision(optax.adam(0.1)).init)(
        params.astype(jnp.bfloat16)
    )
    assert all(x.sharding.spec == placed.spec for x in jax.tree.leaves(state) if x.ndim)


def test_facts_are_learned_in_any_context(fresh):
    """Under a mesh, within `vmap` and `shard_map`, without `jit`."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))
    spec = PartitionSpec("i")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    @jax.vmap
    def learn(x):
        assert all(NAMES[name].is_known() for name in FACTS)
        return x

    with jax.set_mesh(mesh), jax.disable_jit(), warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(jax.device_put(jnp.ones(8), NamedSharding(mesh, spec)))
