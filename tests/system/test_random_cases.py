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


def test_a_traced_setting_is_named():
    link = optax.inject_hyperparams(optax_mp.static_loss_scale)(scale=2.0)
    match = (
        "^static_loss_scale: .*`scale` to be .*, got a traced float32.*`static_args`"
    )
    with pytest.raises(TypeError, match=match):
        jax.jit(link.update)(jnp.ones(2), link.init(jnp.ones(2)))
