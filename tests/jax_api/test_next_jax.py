"""Changes of the next JAX, made here by hand: each is one place in the code."""

import runpy
from types import SimpleNamespace

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from optax_mp.core.jax_api import _contact, _extend, _jaxpr
from optax_mp.jaxprs import _control_flow, _search


def one_class(closed):
    """Return a jaxpr that has its constants itself, and is not in another."""
    jaxpr = getattr(closed, "jaxpr", closed)
    names = ("invars", "outvars", "constvars", "eqns", "effects")
    fields = {name: getattr(jaxpr, name) for name in names}
    return SimpleNamespace(**fields, consts=closed.consts)


def test_without_a_class_of_closed_jaxprs_the_door_has_the_other(monkeypatch):
    monkeypatch.delattr(jax.extend.core, "ClosedJaxpr", raising=False)
    door = runpy.run_path(_extend.__file__)
    assert door["ClosedJaxpr"] is door["Jaxpr"]


def test_a_jaxpr_that_has_its_constants_runs():
    captured = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + captured)(captured)
    (got,) = _jaxpr.evaluate(one_class(closed), [captured])
    assert jnp.array_equal(got, jnp.sin(captured) + captured)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_facts_are_known_on_any_kind_of_mesh(kind, monkeypatch):
    mesh = AbstractMesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    monkeypatch.setattr(_contact, "MESH", mesh)
    _contact.varying_axes.is_known.cache_clear()
    assert _contact.varying_axes.is_known()


def test_what_a_renamed_call_has_inside_is_found():
    """As `closed_call` became `eval_jaxpr`: the next name is not known here."""
    function = jax.grad(jax.checkpoint(lambda x: lax.fori_loop(0, 3, twice, x)))
    (call, _) = jax.make_jaxpr(function)(jnp.ones((2, 2)).sum()).eqns
    renamed = SimpleNamespace(
        primitive=SimpleNamespace(name="renamed"), params=call.params
    )
    assert not _control_flow.has_regions(renamed)
    assert len(_search.jaxprs_within(renamed)) == 1


def twice(_, x):
    return x * 2
