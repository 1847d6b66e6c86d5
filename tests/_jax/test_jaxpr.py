"""Jaxprs run equation by equation: the same numbers, written in the same place."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optax_mp import _jax
from optax_mp._jax._arrays import place_like
from optax_mp._jax._control_flow import run_count
from optax_mp._jax._dataflow import depending_outputs
from optax_mp._jax._jaxpr import bind, evaluate
from optax_mp._jax._source import scopes, source_line

X = jnp.arange(4.0)


def named(x):
    with jax.named_scope("outer"):
        y = jnp.sin(x)
        with jax.named_scope("inner"):
            y = y * 2.0
        y = y + 1.0
    return jnp.cos(y), 3.0


def traced_again(function, *args):
    """Return the jaxprs of a function and of its evaluation."""
    closed = jax.make_jaxpr(function)(*args)
    return closed, jax.make_jaxpr(lambda *args: evaluate(closed, args))(*args)


def test_each_equation_keeps_its_scopes_and_its_source_line():
    first, again = traced_again(named, X)
    assert [scopes(x) for x in first.eqns] == ["outer", "outer/inner", "outer", ""]
    for old, new in zip(first.eqns, again.eqns, strict=True):
        assert (scopes(old), source_line(old)) == (scopes(new), source_line(new))


def partly_partitionable(x):
    x = jnp.sin(x)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        x = jnp.cos(x)
    return jnp.tan(x)


def test_each_equation_keeps_its_configuration():
    first, again = traced_again(partly_partitionable, X)
    set_in = [[x.ctx.threefry_partitionable for x in y.eqns] for y in (first, again)]
    assert set_in[0] == set_in[1] and len(set(set_in[0])) == 2


def test_a_failing_equation_leaves_the_configuration_as_it_was():
    closed = jax.make_jaxpr(partly_partitionable)(X)
    before = jax.config.jax_threefry_partitionable

    def fail_at_cos(equation, inputs):
        if equation.primitive.name == "cos":
            raise FloatingPointError("cos")
        return bind(equation, inputs)

    with pytest.raises(FloatingPointError, match="cos"):
        evaluate(closed, [X], fail_at_cos)
    assert jax.config.jax_threefry_partitionable == before
    assert scopes(jax.make_jaxpr(lax.sin)(X).eqns[0]) == ""


def test_an_array_does_not_depend_on_what_it_is_sharded_like():
    """Calls are not told by name: a user's function may have the same name."""

    @jax.jit
    def optax_mp_place_like(x, other):
        return x * other

    ours = jax.make_jaxpr(lambda x: place_like(jnp.zeros(4), x))(X)
    theirs = jax.make_jaxpr(lambda x: optax_mp_place_like(jnp.zeros(4), x))(X)
    assert depending_outputs(ours) == [False]
    assert depending_outputs(theirs) == [True]


def test_the_folder_imports_nothing_else_of_the_package_but_its_warnings():
    folder = Path(_jax.__file__).parent
    imports = {
        path.name: re.findall(
            r"from (optax_mp\.(?!_jax\b|_warnings\b)[\w.]+)", path.read_text()
        )
        for path in folder.glob("*.py")
    }
    assert {name for name, found in imports.items() if found} == set()


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        (lambda x: lax.scan(lambda x, _: (x * 2, None), x, length=7), 7),
        (lambda x: lax.while_loop(lambda x: x.sum() < 9, jnp.sin, x), None),
        (lambda x: lax.cond(x.sum() < 9, jnp.sin, jnp.cos, x), 1),
    ],
)
def test_how_often_regions_run(loop, count):
    assert run_count(jax.make_jaxpr(loop)(X).eqns[-1]) == count
