"""Products inside functions with batching or transposition rules, and in other calls."""

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import error, products, runs_in
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import sparse
from slow_cases import mostly_slow

from optax_mp import amp, amp_report, amp_stop

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3


def batch(x):
    return jnp.stack([x, 2 * x, x - 1])


@jax.custom_batching.custom_vmap
def with_batching_rule(x, w):
    return jnp.tanh(x @ w), w @ w


@with_batching_rule.def_vmap
def _(size, is_batched, x, w):
    # The mark of the rule: half of what the function returns.
    return (jnp.tanh(x @ w) / 2, w @ w), (is_batched[0], is_batched[1])


@jax.custom_batching.sequential_vmap
def sequential(x, w):
    return jnp.tanh(x @ w)


def linear(x, w):
    return linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)


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
def batched_and_differentiated(x, w):
    return with_batching_rule(x, w)[0]


def differentiate_batched(kept, g):
    x, w = kept
    slope = g * (1 - with_batching_rule(x, w)[0] ** 2)
    return slope @ w.T, x.T @ slope


batched_and_differentiated.defvjp(
    lambda x, w: (batched_and_differentiated(x, w), (x, w)), differentiate_batched
)


@jax.custom_vjp
def recomputed(x, w):
    return jnp.tanh(x @ w)


def recompute(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def differentiate_recomputed(kept, g):
    x, w, y = kept
    slope = g * (1 - y**2)
    return slope @ w.T, x.T @ slope


recomputed.defvjp(recompute, differentiate_recomputed, optimize_remat=True)


def gradient(fun):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(fun(x, w))), (0, 1))


def mapped(fun):
    return lambda x, w: jax.vmap(fun, (0, None))(batch(x), w)


PROGRAMS = {
    "custom_vmap": lambda wrap: wrap(with_batching_rule),
    "vmap(custom_vmap)": lambda wrap: mapped(wrap(with_batching_rule)),
    "jvp(custom_vmap)": lambda wrap: (
        lambda x, w: jax.jvp(wrap(with_batching_rule), (x, w), (x, w))
    ),
    "grad(custom_vjp(custom_vmap))": lambda wrap: gradient(
        wrap(batched_and_differentiated)
    ),
    "vmap(grad(custom_vjp(custom_vmap)))": lambda wrap: mapped(
        gradient(wrap(batched_and_differentiated))
    ),
    "sequential_vmap": lambda wrap: wrap(sequential),
    "vmap(sequential_vmap)": lambda wrap: mapped(wrap(sequential)),
    "amp(vmap(sequential_vmap))": lambda wrap: wrap(mapped(sequential)),
    "linear_call": lambda wrap: wrap(linear),
    "transpose(linear_call)": lambda wrap: (
        lambda x, w: jax.linear_transpose(lambda x: wrap(linear)(x, w), x)(
            jnp.asarray(x)
        )
    ),
    "amp(transpose(linear_call))": lambda wrap: wrap(
        lambda x, w: jax.linear_transpose(lambda x: linear(x, w), x)(x)
    ),
    "grad(custom_jvp(linear_call))": lambda wrap: gradient(wrap(with_linear_rule)),
    "amp(grad(custom_jvp(linear_call)))": lambda wrap: wrap(gradient(with_linear_rule)),
    "scan(linear_call)": lambda wrap: wrap(
        lambda x, w: lax.scan(lambda c, _: (c, linear(c, w)), x, None, length=2)[1]
    ),
    "grad(optimize_remat)": lambda wrap: gradient(wrap(recomputed)),
    "amp(grad(remat(optimize_remat)))": lambda wrap: wrap(
        gradient(jax.checkpoint(recomputed))
    ),
    "jit(grad(jit(custom_jvp(linear_call))))": lambda wrap: jax.jit(
        gradient(jax.jit(wrap(with_linear_rule)))
    ),
}
BY_DEFAULT = "vmap(custom_vmap)", "vmap(sequential_vmap)", "linear_call"
BY_DEFAULT += "grad(custom_jvp(linear_call))", "grad(optimize_remat)"


@mostly_slow("name", PROGRAMS, lambda name: name in BY_DEFAULT)
def test_products_of_a_function_with_a_rule_of_its_own_are_low(name):
    want = PROGRAMS[name](lambda fun: fun)(X, W)
    program = PROGRAMS[name](amp)
    assert error(program(X, W), want) < 2e-2
    found = products(jax.make_jaxpr(program)(X, W))
    assert found and all(runs_in(each, "bfloat16") for each in found)


def test_a_batching_rule_says_what_is_batched():
    outputs = jax.vmap(amp(with_batching_rule), (0, None), (0, None))(batch(X), W)
    assert [x.shape for x in outputs] == [(3, 4, 8), (8, 8)]


def test_amp_stop_reaches_into_a_batching_rule():
    program = mapped(amp(amp_stop(sequential)))
    found = products(jax.make_jaxpr(program)(X, W))
    assert found and all(runs_in(each, "float32") for each in found)


def scheduled(x, w):
    groups = pytest.importorskip("jax.experimental.scheduling_groups")
    return groups.scheduling_group("name")(lambda x, w: jnp.tanh(x @ w))(x, w)


def on_platforms(x, w):
    return lax.platform_dependent(x, w, cpu=jnp.matmul, default=jnp.dot)


@pytest.mark.parametrize("call", [scheduled, on_platforms])
def test_products_of_a_call_are_low(call):
    for program in (amp(call), gradient(amp(call)), mapped(amp(call))):
        found = products(jax.make_jaxpr(program)(X, W))
        assert found and all(runs_in(each, "bfloat16") for each in found)


def solved(x, w):
    return lax.custom_linear_solve(
        lambda v: w @ v, x[0], lambda _, b: w @ b, symmetric=True
    )


def composed(x, w):
    return lax.composite(lambda x, w: jnp.tanh(x @ w), "my.name")(x, w)


def stopped(x, w):
    return amp_stop(jax.jit(lambda x, w: x @ w))(x, w)


@pytest.mark.parametrize("fun", [solved, composed, stopped])
def test_a_report_lists_products_inside_what_stays_as_written(fun):
    rows = amp_report(fun, X, W).operations
    assert {x.ran for x in rows if x.primitive == "dot_general"} == {"as_written"}


@pytest.mark.slow
def test_a_report_lists_products_of_sparse_matrices():
    def fun(x, w):
        return sparse.BCOO.fromdense(w, nse=64) @ x.T

    want = fun(X, W)
    assert error(amp(fun)(X, W), want) < 1e-6
    rows = amp_report(fun, X, W).operations
    assert ("bcoo_dot_general", "as_written") in [(x.primitive, x.ran) for x in rows]
