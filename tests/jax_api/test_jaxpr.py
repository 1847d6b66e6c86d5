"""Jaxprs run equation by equation: the same numbers, written in the same place."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optax_mp.core import jax_api
from optax_mp.core.jax_api._jaxpr import bind, evaluate

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


def scopes(equation):
    return str(equation.source_info.name_stack)


def line(equation):
    """Return the innermost line of this file that an equation comes from."""
    frames = equation.source_info.traceback.frames
    return next(x.line_num for x in frames if x.file_name == __file__)


def test_each_equation_keeps_its_scopes_and_its_source_line():
    first, again = traced_again(named, X)
    assert [scopes(x) for x in first.eqns] == ["outer", "outer/inner", "outer", ""]
    assert len(set(map(line, first.eqns))) == 4
    for old, new in zip(first.eqns, again.eqns, strict=True):
        assert (scopes(old), line(old)) == (scopes(new), line(new))


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


def test_the_folder_imports_nothing_else_of_the_package_but_its_warnings():
    folder = Path(jax_api.__file__).parent
    allowed = (
        r"optax_mp\.core\.(jax_api|_warnings import)|optax_mp\.core import _warnings"
    )
    for path in folder.glob("*.py"):
        for found in re.findall(r"from (optax_mp.*)", path.read_text()):
            assert re.match(allowed, found), f"{path.name}: {found}"
