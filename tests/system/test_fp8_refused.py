"""Values that fp8 layers of Flax return as gradients are refused where gradients come in.

Loss scales: scaling/test_fp8_leaves.py, also for how such a layer trains.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_mp

NAME = "_overwrite_with_gradient"
SGD = optax.sgd(0.1)


def refuses_in_update(make):
    def call(grads):
        tx = make()
        return tx.update(grads, tx.init(grads), grads)

    return call


def zero1():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    return optax_mp.zero1(SGD, mesh, "data")


def release(layers, rest):
    def loss(layers, rest):
        return optax_mp.scan_layers(lambda x, w: (x + w["w"], None), 0.0, layers)[0]

    step = optax_mp.release_gradients(loss, SGD)
    return step(jax.vmap(SGD.init)(layers), layers, rest)


LAYERS = {"w": jnp.ones(3)}
CALLS = {
    "sum_gradients": lambda grads: optax_mp.sum_gradients(grads, "data"),
    "mixed_precision": refuses_in_update(lambda: optax_mp.mixed_precision(SGD)),
    "stochastic_rounding": refuses_in_update(lambda: optax_mp.stochastic_rounding(SGD)),
    "low_bit_state": refuses_in_update(lambda: optax_mp.low_bit_state(SGD)),
    "zero1": refuses_in_update(zero1),
    "with_average": refuses_in_update(lambda: optax_mp.with_average(SGD, 0.9)),
    "release_gradients, in rest": lambda grads: release(LAYERS, grads),
    "release_gradients, in layers": lambda grads: release({**grads, **LAYERS}, None),
}


@pytest.mark.parametrize("caller", CALLS)
def test_the_next_value_of_an_fp8_scale_is_refused(caller):
    grads = {"w": jnp.ones(2), NAME: {"scale": jnp.ones(3)}}
    name = caller.partition(",")[0]
    expected = rf"^{name}: expected weights .* fp8 scale at \S*\['{NAME}'\]\['scale'\], .*TrainState"
    with pytest.raises(ValueError, match=expected):
        CALLS[caller](grads)
