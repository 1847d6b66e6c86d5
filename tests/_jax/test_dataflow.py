"""How inputs reach outputs: held against numbers, and against what a function says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_mp._jax._control_flow import bind_with, has_regions, wiring_of
from optax_mp._jax._dataflow import (
    Origin,
    asked_shardings,
    depending_outputs,
    derivative_calls,
    flows,
    origins,
)
from optax_mp._jax._jaxpr import bind, evaluate, trace_jaxpr

X, Y, Z = (np.linspace(a, a + 2, 5, dtype=np.float32) for a in (0.5, 1.5, -2.5))


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def scanned(x, y, z):
    def body(carry, each):
        first, second = carry
        return (second, first * each), second

    carry, stacked = lax.scan(body, (x, y), jnp.stack([z, z]))
    return [*carry, stacked]


def looped(x, y, z):
    """The third array only says when the loop ends."""

    def body(carry):
        count, first, second = carry
        return count + 1, second, first

    return lax.while_loop(lambda c: c[0] < 4 + z[0], body, (0, x, y))[1:]


FUNCTIONS = {
    "plain": lambda x, y, z: [x + y, jnp.stack([z, z]), jnp.zeros(5), 2.0],
    "jit": lambda x, y, z: jax.jit(lambda a, b: (b, a * 2))(x, y),
    "scan": scanned,
    "while": looped,
    "cond": lambda x, y, z: lax.cond(z[0] > -2, lambda: (x, y), lambda: (y, y)),
    "switch": lambda x, y, z: lax.switch(2, [jnp.sin, jnp.cos, lambda v: v * y], x),
    "custom_jvp": lambda x, y, z: [jax.nn.relu(y - x), z],
    "custom_vjp": lambda x, y, z: [ruled(x * y), ruled(z)],
    "checkpoint": lambda x, y, z: jax.checkpoint(lambda a: (jnp.sin(a), y))(x),
    "gradient": lambda x, y, z: jax.grad(lambda a: jnp.sum(a * y * ruled(a)))(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_changes_an_output_is_among_what_it_depends_on(name):
    function = FUNCTIONS[name]
    closed = jax.make_jaxpr(function)(X, Y, Z)
    before = jax.tree.leaves(function(X, Y, Z))
    for i in range(3):
        args = [X, Y, Z]
        args[i] = args[i] + np.float32(1.25)
        found = depending_outputs(closed, [i == j for j in range(3)])
        changed = [
            not np.array_equal(old, new)
            for old, new in zip(before, jax.tree.leaves(function(*args)), strict=True)
        ]
        assert not [k for k, is_changed in enumerate(changed) if is_changed > found[k]]
        # A branch that is not taken, or another number of iterations, may depend on more.
        if name not in ("cond", "switch", "while", "scan"):
            assert found == changed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_regions_that_are_bound_again_compute_the_same(name):
    def convert(equation, inputs):
        if not has_regions(equation):
            return bind(equation, inputs)

        def again(jaxpr):
            avals = [x.aval for x in getattr(jaxpr, "jaxpr", jaxpr).invars]
            return trace_jaxpr(lambda *xs: evaluate(jaxpr, xs, convert), avals)

        regions = wiring_of(equation).regions
        return bind_with(equation, inputs, lambda: [again(x.jaxpr) for x in regions])

    closed = jax.make_jaxpr(FUNCTIONS[name])(X, Y, Z)
    got = evaluate(closed, [X, Y, Z], convert)
    for x, y in zip(got, evaluate(closed, [X, Y, Z]), strict=True):
        assert np.array_equal(x, y)


def test_origins_say_which_groups_met_and_where():
    def function(x, y, z):
        apart = jnp.sin(x), jnp.cos(y)
        norm = jnp.sqrt(jnp.sum(x * x) + jnp.sum(y * y))
        return *apart, x * norm, z

    closed = jax.make_jaxpr(function)(X, Y, Z)
    own = [Origin(frozenset({i})) for i in range(3)]
    first, second, clipped, third = origins(closed, own)
    assert [x.groups for x in (first, second, third)] == [{0}, {1}, {2}]
    assert not any(x.joined_in for x in (first, second, third))
    assert clipped.groups == {0, 1}
    assert clipped.joined_in.startswith(
        test_origins_say_which_groups_met_and_where.__name__ + " (test_dataflow.py:"
    )


def average(x, y, z):
    return 0.9 * x + 0.1 * y


FLOWS = {
    "reached_by": (lambda x, y, z: x / jnp.sum(y) + z, {0, 2}),
    "decayed": (average, {0, 1}),
    "multiplied": (lambda x, y, z: jnp.outer(x, y) @ z, {0, 1, 2}),
    "factored": (lambda x, y, z: jnp.linalg.cholesky(jnp.outer(x, x)) + y, {0}),
    "terms": (lambda x, y, z: x - 3 * y + z * z, {0, 1}),
    "rooted": (lambda x, y, z: z / jnp.sqrt(average(x, y * y, z)), {0}),
    "subtracted": (lambda x, y, z: x - y * y + 0.1 * (z - x), {0, 1}),
    "differences": (lambda x, y, z: z / jnp.sqrt(x - y * y), {(0, 1)}),
}


@pytest.mark.parametrize("is_in_loop", [False, True])
@pytest.mark.parametrize("field", FLOWS)
def test_flows(field, is_in_loop):
    function, want = FLOWS[field]

    def through(x, y, z):
        if not is_in_loop:
            return function(x, y, z)
        _, (last,) = lax.scan(lambda c, _: (c, [function(x, y, z)]), 0, length=1)
        return last[0]

    (flow,) = flows(jax.make_jaxpr(through)(X, Y, Z))
    assert getattr(flow, field) == want


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: ruled(x) + ruled(2 * Y), 1),
        (lambda x: ruled(x) * ruled(x), 2),
        (lambda x: lax.scan(lambda c, _: (c + ruled(x), None), X, length=3)[0], 3),
        (lambda x: lax.cond(Y[0] > jnp.sum(Y), ruled, lambda v: v, x), math.nan),
        (lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: ruled(x), Y), math.inf),
        (lambda x: x, math.nan),
        (lambda x: ruled(x) + jnp.sin(x), math.nan),
    ],
)
def test_how_often_a_derivative_rule_gets_an_input(function, count):
    found = derivative_calls(jax.make_jaxpr(function)(X), 0)
    assert found == count or (math.isnan(found) and math.isnan(count))


def test_the_sharding_that_is_asked_for_last_counts():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("i",), ()))

    @jax.jit
    def function(x):
        asked = lax.with_sharding_constraint(x, rows)
        return asked, lax.with_sharding_constraint(asked, whole), asked * 2, x

    found = asked_shardings(jax.make_jaxpr(function)(jnp.ones(8)))
    assert found == [rows, whole, None, None]
