"""Recipes for each framework: bfloat16 params, float32 norms, and all products low."""

import functools

import jax
import jax.numpy as jnp
import pytest
import small_models
from jax import lax
from recent_flax import recent_nnx

import optax_mp
from optax_mp import amp, precision_report

MODELS = [f"{x}_transformer" for x in ("linen", "nnx", "equinox", "haiku")]
MODELS.append("nnx_convolutions")
POLICY = optax_mp.get_policy("p=bf16", keep_f32=("*norm*",))


@functools.cache
def problem_of(model, **settings):
    return getattr(small_models, model)(**settings)


def shapes_of_u_net(**settings):
    return problem_of("nnx_u_net", are_shapes_enough=True, **settings)


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


def scanned_linen():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8)(nn.LayerNorm()(x)), None

    axes, rngs = {"params": 0}, {"params": True}
    model = nn.scan(Layer, variable_axes=axes, split_rngs=rngs, length=3)()
    params = model.init(jax.random.key(0), jnp.ones((4, 8)), None)
    return params, lambda params, x: jnp.sum(model.apply(params, x, None)[0] ** 2)


def scanned_nnx():
    nnx = recent_nnx()

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.dense = (
                nnx.LayerNorm(8, rngs=rngs),
                nnx.Linear(8, 8, rngs=rngs),
            )

    layers = nnx.vmap(Layer)(nnx.Rngs(0).split(3))
    graphdef, params = nnx.split(layers)

    def loss(params, x):
        def step(x, params):
            layer = nnx.merge(graphdef, params)
            return x + layer.dense(layer.norm(x)), None

        return jnp.sum(lax.scan(step, x, params)[0] ** 2)

    return params, loss


@pytest.mark.parametrize("make", [scanned_linen, scanned_nnx])
def test_a_scan_over_layers_with_float32_norms_has_a_recipe(make):
    params, loss = make()
    params, x = POLICY.cast_to_param(params), jnp.ones((4, 8), jnp.bfloat16)
    with pytest.raises(
        TypeError, match=r"each loop in `fun` to return its .*run `optax_mp.amp` over"
    ):
        precision_report(loss, params, x)
    fixed = amp(lambda *args: loss(*optax_mp.cast_floating(args, jnp.float32)))
    assert precision_report(fixed, params, x).shares() == {"bfloat16": 1.0}
    grads = jax.jit(jax.grad(fixed))(params, x)
    assert optax_mp.all_finite(grads)
    dtypes = [[y.dtype for y in jax.tree.leaves(x)] for x in (grads, params)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_amp_makes_all_products_of_a_model_low(model):
    problem = problem_of(model)
    report = report_on(problem, amp_of_float32, "float32")
    assert report.shares() == {"bfloat16": 1.0}
    assert report_on(problem, amp, "bfloat16").shares() == {"bfloat16": 1.0}
