"""How inputs reach outputs: small functions with known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_mp._jax._dataflow import flows

ROW = np.ones(4, np.float32)
TABLE = np.ones((3, 4), np.float32)


def flow_of(function, *given):
    """Return how the inputs reach the only output."""
    (flow,) = flows(jax.make_jaxpr(function)(*given))
    return flow


@pytest.mark.parametrize(
    ("function", "reached_by"),
    [
        (lambda x, y: x, {0}),
        (lambda x, y: x + y, {0, 1}),
        (lambda x, y: x * y.sum(), {0}),
        (lambda x, y: x * jnp.vdot(x, y), {0}),
        (lambda x, y: x - y.mean(keepdims=True), {0}),
        (lambda x, y: jnp.zeros_like(x), set()),
        (lambda x, y: jnp.where(x > 0, y, 0), {1}),
        (lambda x, y: jax.jit(jnp.add)(x, y), {0, 1}),
        (lambda x, y: jax.checkpoint(jnp.sin)(y), {1}),
        (lambda x, y: jax.nn.relu(x), {0}),
        (lambda x, y: lax.cond(x.sum() > 0, lambda: x, lambda: y), {0, 1}),
        (lambda x, y: lax.fori_loop(0, 3, lambda i, c: c + x, y), {0, 1}),
        (lambda x, y: lax.scan(lambda c, _: (x, c), y, None, 2)[0], {0, 1}),
    ],
)
def test_what_reaches_an_output(function, reached_by):
    assert flow_of(function, ROW, ROW).reached_by == reached_by


@pytest.mark.parametrize(
    ("function", "faded"),
    [
        (lambda x, y: 0.9 * x + 0.1 * y, {0, 1}),
        (lambda x, y: 0.9 * x + y, {0}),
        (lambda x, y: x + 0.1 * (y - x), {0, 1}),
        (lambda x, y: x + y, set()),
        (lambda x, y: 1.0 * x + y, set()),
        (lambda x, y: x - 2 * y, set()),
        (lambda x, y: jnp.float32(-0.5) * x, {0}),
        (lambda x, y: x * jnp.asarray([0.9, 0.99, 0.0, 0.5]), {0}),
        (lambda x, y: x * jnp.asarray([0.9, 0.99, 0.0, 1.0]), set()),
        (lambda x, y: x * y.sum(), set()),
        (lambda x, y: jnp.full(4, 0.9) * x, {0}),
        (lambda x, y: jax.jit(jnp.multiply)(x, 0.9), {0}),
        (lambda x, y: jnp.maximum(0.999 * x, jnp.abs(y)), {0}),
        (lambda x, y: lax.cond(x.sum() > 0, lambda: 0.9 * x, lambda: x), {0}),
        (lambda x, y: lax.fori_loop(0, 3, lambda i, c: 0.9 * c + x, y), {0, 1}),
    ],
)
def test_what_fades(function, faded):
    assert flow_of(function, ROW, ROW).faded == faded


@pytest.mark.parametrize(
    ("function", "copied", "joined"),
    [
        (lambda x, y: x, {0}, set()),
        (lambda x, y: x[::-1].reshape(2, 6).T, {0}, set()),
        (lambda x, y: x.astype(jnp.bfloat16), {0}, set()),
        (lambda x, y: x + 0, set(), set()),
        (lambda x, y: x.at[1].set(y), {0, 1}, {0, 1}),
        (lambda x, y: x.at[1].set(2 * y), {0}, {0}),
        (lambda x, y: x.at[y.sum().astype(int)].set(0.0), {0}, {0}),
        (lambda x, y: x.at[1].add(y), set(), set()),
        (lambda x, y: jnp.concatenate([y[None], x[:-1]]), {0, 1}, {0, 1}),
        (lambda x, y: jnp.roll(x, 1, axis=0), {0}, {0}),
        (lambda x, y: jnp.where(y > 0, x, 0.0), {0}, set()),
        (lambda x, y: jnp.where(y > 0, x, x.at[0].set(y)), {0, 1}, {0, 1}),
        (lambda x, y: lax.dynamic_update_slice(x, y[None], (1, 0)), {0, 1}, {0, 1}),
        (
            lambda x, y: lax.cond(y.sum() > 0, lambda: x.at[0].set(y), lambda: x),
            {0, 1},
            {0, 1},
        ),
    ],
)
def test_what_is_copied_and_joined(function, copied, joined):
    flow = flow_of(function, TABLE, ROW)
    assert (flow.copied, flow.joined) == (copied, joined)


def test_each_output_has_its_own_flow():
    first, second, third = flows(
        jax.make_jaxpr(lambda x, y: (x, 0.5 * y, jax.random.key(0)))(ROW, ROW)
    )
    assert (first.reached_by, second.faded, third.reached_by) == ({0}, {1}, set())
