"""A loop that ends by a tolerance: `amp_stop` keeps it in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp import amp, amp_stop

W = np.random.default_rng(0).standard_normal((4, 4), np.float32) / 8
W += 2 * np.eye(4, dtype=np.float32)
LIMIT = 60


def residual(y, w):
    return w @ jnp.tanh(y) + y - 1


def newton(w):
    """Return a root and the number of steps."""

    def go_on(carry):
        _, size, count = carry
        return (size > 1e-5) & (count < LIMIT)

    def step(carry):
        y, _, count = carry
        change = jnp.linalg.solve(jax.jacfwd(residual)(y, w), residual(y, w))
        return y - change, jnp.abs(change).max(), count + 1

    return lax.while_loop(go_on, step, (jnp.zeros(4), jnp.float32(np.inf), 0))[::2]


def test_a_root_finder_under_amp_runs_to_its_limit_and_amp_stop_mends_it():
    programs = jax.jit(lambda w: (newton(w), amp(newton)(w), amp(amp_stop(newton))(w)))
    (_, count), (_, low_count), (root, steps) = programs(W)
    assert low_count == LIMIT > 3 * count and steps == count
    # Newton's last change is under its tolerance, in float32.
    assert np.abs(residual(root, W)).max() < 1e-5
