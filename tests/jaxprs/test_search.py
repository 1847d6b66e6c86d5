"""Jaxprs are found wherever a parameter holds them, and no equation is lost."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optax_mp.jaxprs._search import jaxprs_within, live_equations

JAXPR = jax.make_jaxpr(jnp.sin)(1.0)


class Slots:
    """An object without a dictionary, and its base class has a slot as well."""

    __slots__ = "jaxpr"

    def __init__(self, jaxpr):
        self.jaxpr = jaxpr


class MoreSlots(Slots):
    __slots__ = ("empty", "itself")

    def __init__(self, jaxpr):
        super().__init__(jaxpr)
        self.itself = self


@pytest.mark.parametrize(
    "held",
    [
        *(JAXPR, (JAXPR,), [1, (None, JAXPR)], {"a": {"b": JAXPR}}, {JAXPR}),
        *(Slots(JAXPR), MoreSlots([JAXPR]), SimpleNamespace(a=MoreSlots({1: JAXPR}))),
    ],
)
def test_a_jaxpr_is_found_in_any_parameter(held):
    equation = SimpleNamespace(params={"other": "text", "held": held})
    assert jaxprs_within(equation) == [JAXPR]


def test_what_holds_no_jaxpr_is_not_opened():
    held = [jnp.zeros, jax, "text", 1.0, jnp.zeros(3), jnp.float32, lambda: JAXPR]
    assert jaxprs_within(SimpleNamespace(params={"held": held})) == []


@pytest.mark.skipif(not hasattr(jax.config, "jax_scan3"), reason="as in JAX 0.10")
def test_a_loop_that_only_writes_to_references_is_live():
    before = jax.config.jax_scan3
    jax.config.update("jax_scan3", True)
    try:
        loop = lambda x: lax.fori_loop(0, 3, lambda _, x: x @ x, x)  # noqa: E731
        jaxpr = jax.make_jaxpr(loop)(jnp.ones((2, 2))).jaxpr
    finally:
        jax.config.update("jax_scan3", before)
    assert len(live_equations(jaxpr)) == len(jaxpr.eqns) > 1
