"""How often the jaxprs inside an equation run."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optax_mp.jaxprs._control_flow import run_count

X = jnp.arange(4.0)


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
