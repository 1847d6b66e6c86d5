"""Recipes for each framework: bfloat16 params, float32 norms, and all products low."""

import functools

import jax
import jax.numpy as jnp
import pytest
import small_models

import optax_mp
from optax_mp import amp, precision_report

shapes_of_u_net = functools.partial(small_models.nnx_u_net, are_shapes_enough=True)
POLICY = optax_mp.get_policy("p=bf16", keep_f32=("*norm*",))


def report_on(problem, wrap, batch_dtype):
    batch = jax.tree.map(lambda x: x[0], problem.batches)
    batch = optax_mp.cast_floating(batch, batch_dtype)
    params = jax.eval_shape(POLICY.cast_to_param, problem.params)
    dtypes = {x.dtype.name for x in jax.tree.leaves(params)}
    assert dtypes == {"float32", "bfloat16"}  # The policy finds norms.
    return precision_report(wrap(problem.loss), params, problem.state, batch)


def as_it_is(fun):
    return fun


def amp_of_float32(fun):
    """Return `fun` under amp, of params that it sees in float32.

    For layers that take no two dtypes, as Haiku's convolutions.
    """

    def of_float32(params, *args):
        return fun(optax_mp.cast_floating(params, jnp.float32), *args)

    return amp(of_float32)


@pytest.mark.parametrize("wrap", [as_it_is, amp])
def test_attention_that_adds_in_float32_is_low(wrap):
    """`jax.nn.dot_product_attention` asks for `BF16_BF16_F32`, and Flax calls it."""
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.MultiHeadAttention(
        *(2, 16), dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(layer, nnx.Param)

    def loss(params, x):
        return jnp.mean(nnx.merge(graph, params)(x).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.bfloat16)
    report = precision_report(wrap(loss), params, x)
    # All but the gradients of the input.
    assert len(report.products) == 6 + 12 - 3
    assert report.shares() == {"bfloat16": 1.0}


def test_float32_norms_make_most_of_an_unmodified_u_net_float32():
    report = report_on(shapes_of_u_net(), as_it_is, "bfloat16")
    forward = [each for each in report.products if not each.is_backward]
    wide = [each for each in forward if each.is_wide]
    assert (len(wide), len(forward)) == (12, 17)
    for each in report.wide_products:
        cause = each.causes[0]
        assert cause.kind == "argument" and "norm" in cause.name
        assert each.line.startswith("small_models.py:")
    assert report.low_share < 0.1


def test_the_dtype_of_the_layers_makes_a_u_net_low():
    problem = shapes_of_u_net(dtype=jnp.bfloat16)
    report = report_on(problem, as_it_is, "float32")
    assert report.shares() == {"bfloat16": 1.0}


@pytest.mark.parametrize("wrap", [amp, amp_of_float32])
@pytest.mark.parametrize("batch_dtype", ["float32", "bfloat16"])
def test_amp_makes_a_u_net_low(wrap, batch_dtype):
    report = report_on(shapes_of_u_net(), wrap, batch_dtype)
    assert report.shares() == {"bfloat16": 1.0}
    assert len(report.products) == 17 + 16 + 16
