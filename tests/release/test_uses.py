"""How often a function with a derivative rule is given an input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_mp.release._uses import derivative_calls

X, Y = (np.linspace(a, a + 2, 5, dtype=np.float32) for a in (0.5, 1.5))


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


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
