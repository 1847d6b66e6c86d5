"""What an output is computed from: held against numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_mp.core.jax_api._arrays import place_like
from optax_mp.core.jax_api._jaxpr import bind, evaluate
from optax_mp.jaxprs._control_flow import bind_with, has_regions, wiring_of
from optax_mp.jaxprs._dependence import Origin, depending_outputs, origins
from optax_mp.jaxprs._tracing import trace_jaxpr

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
        test_origins_say_which_groups_met_and_where.__name__ + " (test_dependence.py:"
    )


def test_an_array_does_not_depend_on_what_it_is_sharded_like():
    """Calls are not told by name: a user's function may have the same name."""

    @jax.jit
    def optax_mp_place_like(x, other):
        return x * other

    ours = jax.make_jaxpr(lambda x: place_like(jnp.zeros(4), x))(Y[:4])
    theirs = jax.make_jaxpr(lambda x: optax_mp_place_like(jnp.zeros(4), x))(Y[:4])
    assert depending_outputs(ours) == [False]
    assert depending_outputs(theirs) == [True]
