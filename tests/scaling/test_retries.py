"""dynamic_scale_grad and dynamic_scale_value_and_grad: gradients with retries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scaled_losses import (
    BATCH,
    VECTOR,
    network,
    network_params,
    quadratic,
    reference_gradients,
)
from slow_cases import mostly_slow

import optax_mp

FUNCTIONS = [optax_mp.dynamic_scale_grad, optax_mp.dynamic_scale_value_and_grad]


@mostly_slow(
    ("redo", "end", "finite"),
    [(0, 128, False), (2, 32, False), (3, 32, True), (9, 32, True)],
    lambda redo, *_: redo in (2, 9),
)
def test_the_batch_is_tried_again_up_to_redo_on_nan_times(redo, end, finite):
    # Fails at 256, 128 and 64, holds at 32.
    f = optax_mp.dynamic_scale_value_and_grad(
        lambda w: jnp.sum(w * jnp.float16(1024)), redo_on_nan=redo
    )
    scale = optax_mp.DynamicLossScale(256.0)
    new, (loss, grads) = jax.jit(f)(jnp.ones(2, jnp.float16), loss_scale=scale)
    assert float(new.loss_scale) == end
    assert float(loss) == 2048
    assert bool(optax_mp.all_finite(grads)) is finite
    if finite:
        assert grads.tolist() == [1024] * 2
        assert new.counter == 1


@pytest.mark.parametrize("redo", [0, 4])
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
    new, ((loss, aux), grads) = jax.jit(f)(jnp.ones(2), loss_scale=scale)
    assert np.isnan(aux).all()
    assert (float(new.loss_scale), int(new.counter)) == (8, 1)
    assert (float(loss), grads.tolist()) == (2, [1, 1])


VALUES = {
    "none": optax_mp.NoOpLossScale(),
    "static": optax_mp.StaticLossScale(1024.0),
    "dynamic": optax_mp.DynamicLossScale(1024.0, period=3),
}


@mostly_slow("kind", VALUES, lambda kind: kind == "dynamic")
def test_every_kind_of_loss_scale_gives_the_gradients_of_jax(kind):
    params, x = network_params("float32"), jnp.asarray(BATCH, jnp.float32)
    f = jax.jit(optax_mp.dynamic_scale_value_and_grad(network, redo_on_nan=2))
    scale = VALUES[kind]
    new, (loss, grads) = f(params, x, loss_scale=scale)
    want_loss, want = reference_gradients(params, x)
    assert jax.tree.structure(new) == jax.tree.structure(scale)
    assert new.loss_scale == scale.loss_scale
    # Sums in another order where XLA fuses.
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_arguments_are_named(function):
    name = function.__name__
    expected = f"^{name}: expected `redo_on_nan` to be an integer, 0 or more, got -1"
    with pytest.raises(ValueError, match=expected):
        function(quadratic, redo_on_nan=-1)
    for bad in (1024.0, None):
        with pytest.raises(TypeError, match=f"^{name}: .*`loss_scale` to be .*, got"):
            function(quadratic)(jnp.ones(2), loss_scale=bad)
    with pytest.raises(
        ValueError, match=f"^{name}: expected the loss to be a floating"
    ):
        function(lambda x: x)(VECTOR, loss_scale=optax_mp.StaticLossScale(8.0))
