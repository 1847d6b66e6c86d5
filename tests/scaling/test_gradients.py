"""scale_loss and value_and_grad: gradients of a scaled loss."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from scaled_losses import (
    BAD_LOSSES,
    BATCH,
    HALVES,
    NESTINGS,
    NO_SCALE,
    PARAMS,
    VECTOR,
    network,
    network_params,
    quadratic,
    reference_gradients,
    state_with,
)
from slow_cases import mostly_slow

import optax_mp


@pytest.mark.parametrize("nesting", NESTINGS)
def test_the_scale_is_found_in(nesting):
    state = NESTINGS[nesting]().init(PARAMS)
    scale = optax_mp.loss_scale(state)
    assert (float(scale), scale.dtype, scale.shape) == (1024, jnp.float32, ())
    assert optax_mp.scale_loss(2.0, state) == 2048


# scale_loss


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_scale_loss_is_a_float32_product_or_the_loss_itself(dtype):
    loss = jnp.array(60000.0, dtype)
    scaled = optax_mp.scale_loss(loss, state_with(2.0**16))
    assert scaled.dtype == jnp.float32
    assert float(scaled) == float(loss) * 2.0**16
    assert optax_mp.scale_loss(loss, NO_SCALE) is loss


def equations(fun, *args):
    return str(jax.make_jaxpr(fun)(*args).jaxpr)


def test_scale_loss_without_a_scale_adds_no_equation():
    plain = equations(jax.grad(quadratic), PARAMS)
    scaled = equations(
        jax.grad(lambda p: optax_mp.scale_loss(quadratic(p), NO_SCALE)), PARAMS
    )
    assert scaled == plain


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_that_is_no_floating_scalar_is_named(name):
    make, shown = BAD_LOSSES[name]
    expected = f": expected the loss to be a floating scalar, got {shown}"
    state = state_with(8.0)
    with pytest.raises(ValueError, match="^scale_loss" + expected):
        optax_mp.scale_loss(make(VECTOR), state)
    with pytest.raises(ValueError, match="^value_and_grad" + expected):
        optax_mp.value_and_grad(make)(state, VECTOR)
    with pytest.raises(ValueError, match="^value_and_grad" + expected):
        optax_mp.value_and_grad(lambda x: (make(x), 1), has_aux=True)(state, VECTOR)


# value_and_grad


@mostly_slow("dtype", [*HALVES, "float32"], lambda dtype: dtype == "float16")
def test_gradients_are_float32_and_scaled(dtype):
    params, x = network_params(dtype), jnp.asarray(BATCH, dtype)
    f = jax.jit(optax_mp.value_and_grad(network))
    loss, grads = f(state_with(1024.0), params, x)
    wide = optax_mp.cast_floating(params, "float32")
    want_loss, want = reference_gradients(wide, x.astype(jnp.float32))

    assert loss.dtype == dtype
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    # The forward pass runs in `dtype`; some of its roundings add up.
    rtol = {"float32": 1e-6, "float16": 0.005, "bfloat16": 0.04}[dtype]
    np.testing.assert_allclose(loss, want_loss, rtol=rtol)
    for name, grad in grads.items():
        error = np.abs(grad / 1024 - want[name]).max()
        assert error <= rtol * np.abs(want[name]).max(), name


def unscaled(dtype):
    """Expect a warning if gradients in this dtype are taken without a loss scale."""
    if dtype != "float16":
        return contextlib.nullcontext()
    return pytest.warns(optax_mp.MixedPrecisionWarning, match="holds no loss scale")


@mostly_slow("dtype", HALVES, lambda dtype: dtype == "float16")
def test_without_a_scale_gradients_are_those_of_jax_in_float32(dtype):
    params, x = network_params(dtype), jnp.asarray(BATCH, dtype)
    with unscaled(dtype):
        found = jax.jit(optax_mp.value_and_grad(network))(NO_SCALE, params, x)
    loss, grads = jax.jit(jax.value_and_grad(network))(params, x)
    assert as_bits(found) == as_bits((loss, optax_mp.cast_floating(grads, "float32")))


def test_gradients_that_float16_loses_are_kept_by_the_scale():
    weight = jnp.ones(2, jnp.float16)

    def tiny(w):
        return jnp.sum(w * jnp.float16(2.0**-14)) * jnp.float16(2.0**-14)

    # Cotangents of 2^-28 underflow float16, whose smallest number is 2^-24. Not under
    # `jit`: XLA multiplies the two constants first.
    f = optax_mp.value_and_grad(tiny)
    with unscaled("float16"):
        _, lost = f(NO_SCALE, weight)
    assert lost.tolist() == [0, 0]
    _, kept = f(state_with(2.0**12), weight)
    assert kept.tolist() == [2.0**-16] * 2


def three(x, y, z):
    return jnp.sum(x * y**2 * z["w"])


@pytest.mark.parametrize("argnums", [-3, (0,), [1, -1]])
def test_argnums_choose_as_for_jax(argnums):
    args = (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]), {"w": jnp.array([5.0, 6.0])})
    f = jax.jit(optax_mp.value_and_grad(three, argnums))
    loss, grads = f(state_with(8.0), *args)
    listed = tuple(argnums) if isinstance(argnums, list) else argnums
    want_loss, want = jax.value_and_grad(three, listed)(*args)
    assert loss == want_loss
    assert type(grads) is type(want)
    # Powers of two scale without rounding.
    assert as_bits(grads) == as_bits(jax.tree.map(lambda g: 8 * g, want))


def test_argnums_out_of_range_are_named():
    for argnums, bad in ((2, 2), (-3, -3), ((0, 5), 5)):
        expected = (
            f"^value_and_grad: `argnums` has {bad}, but 2 positional arguments of the "
            r"function were given; call as f\(opt_state, params, ...\)"
        )
        with pytest.raises(ValueError, match=expected):
            optax_mp.value_and_grad(jnp.dot, argnums)(state_with(8.0), VECTOR, VECTOR)


def test_aux_comes_back_unscaled_and_as_it_is():
    def fun(w):
        return jnp.sum(w**2), {"sum": jnp.sum(w), "name": "aux", "none": None}

    f = optax_mp.value_and_grad(fun, has_aux=True)
    (loss, aux), grads = f(state_with(4.0), jnp.array([3.0], jnp.float16))
    assert float(loss) == 9
    assert aux == {"sum": 3.0, "name": "aux", "none": None}
    assert aux["sum"].dtype == jnp.float16
    assert grads.tolist() == [24.0]


def test_leaves_that_are_no_floats_get_none():
    tree = {
        "w": jnp.array([2.0], jnp.bfloat16),
        "count": jnp.int32(3),
        "flag": jnp.array(True),
        "key": jax.random.key(0),
        "activation": jnp.tanh,
        "name": "layer",
        "none": None,
        # Its rate and flag are Python numbers.
        "dropout": eqx.nn.Dropout(0.5),
    }

    def fun(tree):
        assert tree["name"] == "layer"
        return jnp.sum(tree["activation"](tree["w"]) * tree["count"])

    _, grads = optax_mp.value_and_grad(fun)(state_with(8.0), tree)
    others = {k: v for k, v in grads.items() if k != "w"}
    assert not jax.tree.leaves(others)
    assert others.keys() == tree.keys() - {"w"}
    assert grads["w"].dtype == jnp.float32


def test_a_call_is_judged_by_what_it_does_itself():
    """Neither by the dtypes of an earlier call, nor by a loss that scaled itself then."""
    scales = [True]

    def loss(x):
        value = (x**2).sum()
        return optax_mp.StaticLossScale(2.0).scale(value) if scales.pop() else value

    f = optax_mp.value_and_grad(lambda x: (x**2).sum())
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="computed in float16"):
        f(optax.EmptyState(), jnp.ones(2, jnp.float16))
    f(optax.EmptyState(), jnp.ones(2, jnp.bfloat16))  # a warning would be an error
    state = optax_mp.static_loss_scale(optax.sgd(0.1), 8.0).init(jnp.ones(2))
    g = optax_mp.value_and_grad(loss)
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="scales it once more"):
        g(state, jnp.ones(2))
    scales.append(False)
    g(state, jnp.ones(2))


def test_no_loss_scale_scales_nothing():
    """Beside a loss scale in the state it is right."""
    state = optax_mp.static_loss_scale(optax.sgd(0.1), 8.0).init(jnp.ones(2))
    none = optax_mp.NoOpLossScale()
    optax_mp.value_and_grad(lambda x: none.scale((x**2).sum()))(state, jnp.ones(2))
