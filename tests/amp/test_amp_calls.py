"""Products in calls of many kinds: low, or listed as what stays as written."""

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import A_FEW_ROUNDINGS, compiled, error, products, runs_in, shapes
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental.compute_on import compute_on
from programs import operations
from with_rules import backward, forward, gradient

from optax_mp import amp, amp_report, amp_stop

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3


@jax.custom_batching.sequential_vmap
def sequential(x, w):
    return jnp.tanh(x @ w)


@jax.custom_jvp
def with_linear_rule(x, w):
    return jnp.tanh(x @ w)


@with_linear_rule.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = jnp.tanh(x @ w)
    by_x = linear_call(lambda w, d: d @ w, lambda w, g: g @ w.T, w, dx)
    by_w = linear_call(lambda x, d: x @ d, lambda x, g: x.T @ g, x, dw)
    return y, (1 - y**2) * (by_x + by_w)


@jax.custom_vjp
def recomputed(x, w):
    return jnp.tanh(x @ w)


recomputed.defvjp(forward, backward, optimize_remat=True)


def mapped(fun):
    return lambda x, w: jax.vmap(fun, (0, None))(jnp.stack([x, 2 * x]), w)


@pytest.mark.parametrize(
    ("fun", "transform"), [(sequential, mapped), (with_linear_rule, gradient)]
)
def test_functions_with_batching_and_transposition_rules_keep_these(fun, transform):
    if fun is with_linear_rule and jax.__version_info__ < (0, 9):
        pytest.skip("JAX 0.8 gives such a rule literals that are no arrays")
    programs = transform(fun), transform(amp(fun))
    want, got = compiled(lambda *args: [f(*args) for f in programs], X, W)(X, W)
    assert shapes(got) == shapes(want) and error(got, want) < A_FEW_ROUNDINGS


def on_platforms(x, w):
    return lax.platform_dependent(x, w, cpu=jnp.matmul, default=jnp.dot)


@pytest.mark.parametrize(
    "program",
    [
        *(amp(on_platforms), gradient(amp(on_platforms)), mapped(amp(on_platforms))),
        *(gradient(amp(recomputed)), amp(gradient(jax.checkpoint(recomputed)))),
    ],
)
def test_products_for_a_platform_and_of_optimized_remat_are_low(program):
    found = products(jax.make_jaxpr(program)(X, W))
    assert found and all(runs_in(each, "bfloat16") for each in found)


def test_a_product_computed_on_the_host_is_low_and_stays_there():
    def fun(x, w):
        return jnp.tanh(x @ w)

    if jax.__version_info__ >= (0, 12):  # the context became a function
        space = jax.memory.Space.Device
        on_host = compute_on(fun, compute_type="device_host", out_memory_spaces=space)
    else:
        on_host = compute_on("device_host")(jax.jit(fun))
    found = [
        x.equation
        for x in operations(jax.make_jaxpr(amp(on_host))(X, W))
        if x.name == "dot_general"
    ]
    assert [x.invars[0].aval.dtype for x in found] == ["bfloat16"]
    assert [x.ctx.compute_type for x in found] == ["device_host"]


def solved(x, w):
    return lax.custom_linear_solve(
        lambda v: w @ v, x[0], lambda _, b: w @ b, symmetric=True
    )


def composed(x, w):
    return lax.composite(lambda x, w: jnp.tanh(x @ w), "my.name")(x, w)


def stopped(x, w):
    return amp_stop(jax.jit(lambda x, w: x @ w))(x, w)


@pytest.mark.parametrize("fun", [solved, composed, stopped, sequential])
def test_a_report_lists_products_inside_what_stays_as_written(fun):
    rows = amp_report(fun, X, W).operations
    assert {x.ran for x in rows if x.primitive == "dot_general"} == {"as_written"}
