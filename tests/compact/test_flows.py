"""How inputs reach outputs: held against what a function says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_mp.compact._flows import flows

X, Y, Z = (np.linspace(a, a + 2, 5, dtype=np.float32) for a in (0.5, 1.5, -2.5))


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
