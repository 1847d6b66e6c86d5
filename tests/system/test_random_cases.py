"""Random trees in frameworks' boxes, with every optimizer; and JAX's strict mode."""

import jax
import jax.numpy as jnp
import optax
import pytest
from slow_cases import mostly_slow

import optax_mp

pytest.importorskip("equinox")
pytest.importorskip("flax")

import random_cases


@mostly_slow("seed", range(206, 213), (207).__eq__)
@pytest.mark.filterwarnings("ignore")
def test_cases_with_every_optimizer(seed):
    """`python tests/support/random_cases.py 0 1000` runs more."""
    try:
        random_cases.run(seed, 16)
    finally:
        jax.config.update("jax_enable_x64", False)


MOMENTUM = optax.sgd(0.1, momentum=0.9)
LOW = optax_mp.low_bit_state(MOMENTUM)
FORMS = {
    "masters": optax_mp.mixed_precision(MOMENTUM),
    "5.1 bytes": optax_mp.mixed_precision(LOW, storage=optax_mp.Split(8)),
    "scaled": optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(LOW)),
    "stochastic": optax_mp.stochastic_rounding(LOW, 0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strict_promotion_is_no_obstacle(form, dtype):
    tx = FORMS[form]
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    grads = {"w": jnp.ones((64, 128), dtype)}
    with jax.numpy_dtype_promotion("strict"):
        args = grads, tx.init(params), params
        jax.eval_shape(tx.update, *args)
        str(optax_mp.gradient_range_report(grads))


def test_a_traced_setting_is_named():
    link = optax.inject_hyperparams(optax_mp.static_loss_scale)(scale=2.0)
    match = (
        "^static_loss_scale: .*`scale` to be .*, got a traced float32.*`static_args`"
    )
    with pytest.raises(TypeError, match=match):
        jax.jit(link.update)(jnp.ones(2), link.init(jnp.ones(2)))
