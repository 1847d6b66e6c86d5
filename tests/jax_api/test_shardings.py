"""Arrays sharded like others or as asked, in types and by hints; computed once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_mp.compact._codes import whole_along
from optax_mp.core.jax_api._arrays import (
    computed_once,
    constant_like,
    fits_groups,
    place_like,
    reshard_like,
    sharding_in_type,
    spec_in_type,
)
from optax_mp.core.jax_api._shardings import asked_shardings

ROWS = PartitionSpec("rows", None)


def sharding(kind, spec=ROWS):
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(kind, kind))
    return NamedSharding(mesh, spec)


def test_a_hint_shards_what_a_program_makes():
    like = jax.device_put(jnp.ones((8, 6)), sharding(AxisType.Auto))

    def make(like, is_placed):
        made = jnp.arange(48.0).reshape(8, 6)
        return place_like(made, like) if is_placed else made

    made = jax.jit(make, static_argnums=1)
    assert not made(like, False).sharding.is_equivalent_to(like.sharding, 2)
    placed = made(like, True)
    assert placed.sharding.is_equivalent_to(like.sharding, 2)
    assert np.array_equal(placed, np.arange(48.0).reshape(8, 6))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.complex64, jnp.bool_])
def test_a_hint_changes_no_value_whatever_it_is_beside(dtype):
    beside = jnp.full((2, 3), jnp.nan, jnp.complex64)
    values = jnp.arange(6).reshape(2, 3).astype(dtype)
    for like in (beside, beside.real):
        got = jax.jit(place_like)(values, like)
        assert got.dtype == dtype and np.array_equal(got, values)
        stacked = jax.vmap(place_like)(values, like)
        assert np.array_equal(stacked, values)
    _, tangent = jax.jvp(
        lambda x: place_like(x, beside.real), (jnp.ones((2, 3)),), (jnp.ones((2, 3)),)
    )
    assert np.array_equal(tangent, np.ones((2, 3)))


def test_a_type_that_has_a_sharding_needs_no_hint():
    explicit = sharding(AxisType.Explicit)
    with jax.set_mesh(explicit.mesh):
        like = jax.device_put(jnp.ones((8, 6)), explicit)
        assert spec_in_type(jax.jit(place_like)(jnp.zeros((8, 6)), like)) == ROWS
        assert reshard_like(like, like) is like
        text = str(jax.make_jaxpr(place_like)(jnp.zeros((8, 6)), like))
    assert "reshard" in text and "place_like" not in text
    hinted = jax.device_put(jnp.ones((8, 6)), sharding(AxisType.Auto))
    assert sharding_in_type(hinted) is None


@pytest.mark.parametrize(
    ("spec", "axis", "size", "fits"),
    [
        (("rows", None), 0, 2, True),  # 8 rows, 2 on each of 4 devices
        (("rows", None), 0, 4, False),
        (("rows", None), 1, 32, True),  # not sharded along it
        ((("rows", "columns"),), 0, 1, True),
        ((("rows", "columns"),), 0, 2, False),
        (("rows", "columns"), 1, 4, False),  # 6 columns, 3 on each of 2
    ],
)
def test_blocks_stay_on_one_device(spec, axis, size, fits):
    explicit = sharding(AxisType.Explicit, PartitionSpec(*spec))
    assert fits_groups(explicit, axis, (8, 6)[axis], size) == fits
    with jax.set_mesh(explicit.mesh):
        x = jax.device_put(jnp.arange(48.0).reshape(8, 6), explicit)
        whole = whole_along(x, axis, size)
        assert np.array_equal(whole, x)
        assert (whole is x) == fits
        assert fits_groups(whole.sharding, axis, (8, 6)[axis], size)


def test_a_number_that_is_computed_once_is_the_same_number():
    x = jnp.arange(6.0)
    for run in (computed_once, jax.jit(computed_once), jax.vmap(computed_once)):
        assert np.array_equal(run(x), x)
    assert jax.grad(lambda x: computed_once(x).sum())(x).tolist() == [1] * 6
    traced = jax.jit(computed_once).trace(x)
    for platform in ("cpu", "tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("inlineable" in text) == (platform == "cpu")


def test_a_constant_is_where_the_array_is():
    auto, explicit = map(sharding, (AxisType.Auto, AxisType.Explicit))
    x = jax.device_put(jnp.ones((8, 6), jnp.bfloat16), auto)
    assert constant_like(x, 3).sharding == auto
    made = jax.jit(lambda x: constant_like(x, 3))(x)
    assert made.dtype == x.dtype and np.array_equal(made, np.full((8, 6), 3))
    with jax.set_mesh(explicit.mesh):
        y = jax.device_put(jnp.ones((8, 6)), explicit)
        assert jax.jit(lambda y: spec_in_type(constant_like(y, 3)) == ROWS)(y)


def test_the_sharding_that_is_asked_for_last_counts():
    auto, whole = sharding(AxisType.Auto), sharding(AxisType.Auto, PartitionSpec())

    @jax.jit
    def function(x):
        asked = lax.with_sharding_constraint(x, auto)
        again = lax.with_sharding_constraint(asked, whole)
        kept = lax.optimization_barrier((computed_once(asked), x))
        return asked, again, *kept, place_like(asked, x), asked * 2, x, 2.0

    def outer(x):
        return *function(x), *function(lax.with_sharding_constraint(x, whole))

    x = jnp.ones((8, 6))
    found = asked_shardings(jax.make_jaxpr(outer)(x))
    first, second = found[:8], found[8:]
    assert first == [auto, whole, auto, None, auto, None, None, None]
    assert second == [auto, whole, auto, whole, auto, None, whole, None]
    explicit = sharding(AxisType.Explicit)
    with jax.set_mesh(explicit.mesh):
        closed = jax.make_jaxpr(lambda x: jax.sharding.reshard(x, explicit))(x)
    assert [x.spec for x in asked_shardings(closed)] == [ROWS]
