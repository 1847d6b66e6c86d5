"""dynamic_scale_grad and dynamic_scale_value_and_grad: gradients with retries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scaled_losses import (
    BAD_LOSSES,
    BATCH,
    VECTOR,
    network,
    network_params,
    quadratic,
    reference_gradients,
)
from slow_cases import mostly_slow

import optax_mp

BAD_LOSS = pytest.mark.parametrize("name", BAD_LOSSES)


@BAD_LOSS
@pytest.mark.parametrize(
    "function", ["dynamic_scale_grad", "dynamic_scale_value_and_grad"]
)
def test_dynamic_scale_names_a_loss_that_is_no_floating_scalar(function, name):
    make, shown = BAD_LOSSES[name]
    expected = f"^{function}: expected the loss to be a floating scalar, got {shown}"
    with pytest.raises(ValueError, match=expected):
        getattr(optax_mp, function)(make)(
            VECTOR, loss_scale=optax_mp.StaticLossScale(8.0)
        )


def overflowing(limit):
    """Return a loss whose float16 gradient overflows from a scale of `limit` on."""
    slope = 2.0**16 / limit

    def fun(w):
        return jnp.sum(w * jnp.float16(slope))

    return fun, slope


@mostly_slow(
    ("redo", "end", "finite", "jit"),
    [
        (*case, jit)
        for case in [
            (0, 128, False),
            (1, 64, False),
            (2, 32, False),
            (3, 32, True),
            (9, 32, True),
        ]
        for jit in (False, True)
    ],
    lambda redo, end, finite, jit: jit or redo == 3,
)
def test_the_batch_is_tried_again_up_to_redo_on_nan_times(redo, end, finite, jit):
    # Fails at 256, 128 and 64, holds at 32.
    fun, slope = overflowing(64.0)
    f = optax_mp.dynamic_scale_value_and_grad(fun, redo_on_nan=redo)
    call = jax.jit(lambda w, s: f(w, loss_scale=s)) if jit else None
    scale = optax_mp.DynamicLossScale(256.0)
    weight = jnp.ones(2, jnp.float16)
    new, (loss, grads) = call(weight, scale) if jit else f(weight, loss_scale=scale)
    assert float(new.loss_scale) == end
    assert float(loss) == 2 * slope
    assert bool(optax_mp.all_finite(grads)) is finite
    if finite:
        assert grads.tolist() == [slope] * 2
        assert new.counter == 1


@pytest.mark.parametrize("redo", [0, 1, 4])
def test_a_nan_that_stays_is_tried_exactly_redo_on_nan_times_more(redo):
    tries = []

    def fun(w):
        jax.debug.callback(lambda: tries.append(1))
        return jnp.sum(w) * jnp.nan

    f = optax_mp.dynamic_scale_grad(fun, redo_on_nan=redo)
    new, grads = f(jnp.ones(2), loss_scale=optax_mp.DynamicLossScale(1024.0))
    jax.effects_barrier()
    assert len(tries) == 1 + redo
    assert new.loss_scale == 1024 / 2 ** (1 + redo)
    assert np.isnan(grads).all()


@pytest.mark.parametrize("redo", [0, 3])
def test_a_nan_in_aux_does_not_shrink_the_scale(redo):
    f = optax_mp.dynamic_scale_value_and_grad(
        lambda w: (jnp.sum(w), jnp.log(-w)), has_aux=True, redo_on_nan=redo
    )
    scale = optax_mp.DynamicLossScale(8.0)
    new, ((loss, aux), grads) = f(jnp.ones(2), loss_scale=scale)
    assert np.isnan(aux).all()
    assert (float(new.loss_scale), int(new.counter)) == (8, 1)
    assert (float(loss), grads.tolist()) == (2, [1, 1])


VALUES = {
    "none": optax_mp.NoOpLossScale(),
    "static": optax_mp.StaticLossScale(1024.0),
    "dynamic": optax_mp.DynamicLossScale(1024.0, period=3),
}


@mostly_slow(
    ("kind", "redo", "jit"),
    itertools.product(VALUES, [0, 2], [False, True]),
    lambda kind, redo, jit: jit and (redo == 2 or kind == "dynamic"),
)
def test_every_kind_of_loss_scale_gives_the_gradients_of_jax(kind, redo, jit):
    params, x = network_params("float32"), jnp.asarray(BATCH, jnp.float32)
    f = optax_mp.dynamic_scale_value_and_grad(network, redo_on_nan=redo)

    def call(params, x, scale):
        return f(params, x, loss_scale=scale)

    scale = VALUES[kind]
    new, (loss, grads) = (jax.jit(call) if jit else call)(params, x, scale)
    want_loss, want = reference_gradients(params, x)
    assert jax.tree.structure(new) == jax.tree.structure(scale)
    assert new.loss_scale == scale.loss_scale
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name, grad in grads.items():
        # Sums in another order where XLA fuses.
        np.testing.assert_allclose(grad, want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, -10])
@pytest.mark.parametrize(
    "function", ["dynamic_scale_grad", "dynamic_scale_value_and_grad"]
)
def test_a_negative_redo_on_nan_is_named(function, bad):
    expected = (
        f"{function}: expected `redo_on_nan` to be an integer, 0 or more, got {bad}"
    )
    with pytest.raises(ValueError, match=f"^{expected}"):
        getattr(optax_mp, function)(quadratic, redo_on_nan=bad)


@pytest.mark.parametrize("bad", [1024.0, None, jnp.float32(8)])
def test_a_loss_scale_that_is_no_value_is_named(bad):
    f = optax_mp.dynamic_scale_grad(quadratic)
    with pytest.raises(
        TypeError, match="dynamic_scale_grad: .*`loss_scale` to be .*, got"
    ):
        f(jnp.ones(2), loss_scale=bad)
