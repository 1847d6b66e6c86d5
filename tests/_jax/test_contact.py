"""What is known of JAX: learned whatever its names are, and off with a warning if not."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_mp
from optax_mp._jax import _contact
from optax_mp._jax._contact import is_plain_call, is_seen, is_traced_by_jit
from optax_mp.engine import _lowered

X, NARROW = (jax.ShapeDtypeStruct((2,), x) for x in ("float32", "float16"))


NAMES = vars(_contact) | vars(_lowered)


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


def effects_of(function):
    return jax.make_jaxpr(function, axis_env=[("i", 1)])().effects


def calls_are_plain():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    placed = NamedSharding(mesh, PartitionSpec())
    calls = jax.jit(jnp.sin), jax.jit(jnp.sin, in_shardings=placed)
    return [is_plain_call(jax.make_jaxpr(x)(1.0).eqns[0]) for x in calls]


def varies():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    found = []

    def note():
        found.append(bool(_contact.varying_axes(INDEX("i"))))
        found.append(bool(_contact.varying_axes(jnp.zeros(()))))
        return jnp.zeros(1)

    spec = PartitionSpec("i")
    jax.eval_shape(jax.shard_map(note, mesh=mesh, in_specs=(), out_specs=spec))
    return found


def is_error_of_carry():
    with pytest.raises(TypeError) as error:
        lax.scan(lambda x, _: (x.astype(jnp.float32), None), jnp.bfloat16(1), None, 1)
    return _contact.is_carry_error(error.value)


def square(x):
    return x * x


SLOPE, INDEX = jax.grad(square), lax.axis_index


def has_read(read, function, argument):
    return _lowered._read_lowered(read, function, argument) is not None


def sharded():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jax.ShapeDtypeStruct(
        (8, 8), "float32", sharding=NamedSharding(mesh, PartitionSpec(None, "b"))
    )


# What is asked, the answer, that without the fact, and how JAX changes.
FACTS = {
    "is_traced_by_jit": (
        lambda: [*kinds_in(lambda f: f), *kinds_in(jax.vmap)],
        ([True, False], [False, False]),
        (jax, "vmap", lambda f: f),
    ),
    "is_seen": (
        lambda: [
            *map(is_seen, effects_of(lambda: INDEX("i"))),
            *map(is_seen, effects_of(lambda: jax.debug.print(""))),
        ],
        ([False, True], [True, True]),
        (lax, "axis_index", lambda _: jax.debug.print("")),
    ),
    "is_plain_call": (
        calls_are_plain,
        ([True, False], [False, False]),
        (_contact, "_SETTINGS", ("in_shardings", "renamed")),
    ),
    "varying_axes": (
        varies,
        ([True, False], [False, False]),
        (_contact, "_VARYING", ("renamed",)),
    ),
    "is_transposed": (
        lambda: set(map(_contact.is_transposed, jax.make_jaxpr(SLOPE)(1.0).eqns)),
        ({True, False}, {False}),
        (_contact, "_TRANSPOSE", "renamed"),
    ),
    "place_of": (
        lambda: __file__ in _contact.place_of(jax.make_jaxpr(square)(1.0).jaxpr),
        (True, False),
        (_contact, "_SOURCE", "renamed"),
    ),
    "is_carry_error": (
        is_error_of_carry,
        (True, False),
        (_contact, "_CARRY_ERROR", ("renamed",)),
    ),
    "widened_from": (
        lambda: [
            has_read(_lowered.widened_from, lambda x: x.astype(jnp.float32), NARROW),
            has_read(_lowered.widened_from, lambda x: x + 1, X),
        ],
        ([True, False], [False, False]),
        (_lowered, "_CONVERT", "renamed"),
    ),
    "sharding_of": (
        lambda: [
            has_read(_lowered.sharding_of, lambda x: x, sharded()),
            has_read(_lowered.sharding_of, lambda x: x + 1, sharded()),
        ],
        ([True, False], [False, False]),
        (_lowered, "_SHARDING", re.compile("renamed")),
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
