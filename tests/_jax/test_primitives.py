"""The table of primitive facts: no contradictions, and facts that hold on numbers."""

import jax
import numpy as np
import pytest
from jax import lax

from optax_mp._jax import _control_flow, _primitives

UNARY = {
    "abs": lax.abs, "atan": lax.atan, "asinh": lax.asinh, "cbrt": lax.cbrt,
    "ceil": lax.ceil, "cosh": lax.cosh, "erf": lax.erf, "erfc": lax.erfc,
    "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "floor": lax.floor,
    "log1p": lax.log1p, "logistic": lax.logistic, "round": lax.round,
    "rsqrt": lax.rsqrt, "sign": lax.sign, "sinh": lax.sinh, "sqrt": lax.sqrt,
    "square": lax.square, "tanh": lax.tanh, "cumprod": lax.cumprod, "cummin": lax.cummin,
    "cummax": lax.cummax, "cumsum": lax.cumsum,
}  # fmt: skip
# Without zeros: the inverse of -0.0 is negative.
X = np.array([1e-30, 0.3, 0.7, 1.0, 1.5, 2.5, 60.0], np.float32)


def test_each_primitive_is_in_one_row():
    names = [name for row in _primitives._ROWS for name in row[3:]]
    assert len(names) == len(set(names))


def test_what_repeats_moves():
    assert _primitives.REPEATS < _primitives.MOVES


@pytest.mark.parametrize("name", UNARY)
def test_signs_hold_on_numbers(name):
    assert str(jax.make_jaxpr(UNARY[name])(X).eqns[0].primitive) == name
    is_always = name in _primitives.NEVER_NEGATIVE
    assert is_always != (name in _primitives.KEEPS_SIGN)
    found = np.asarray(UNARY[name](np.concatenate([-X, X]) if is_always else X))
    assert not (found < 0).any()


def test_calls_have_the_names_of_this_jax():
    function = jax.grad(jax.checkpoint(lambda x: lax.fori_loop(0, 3, _twice, x)))
    equations = jax.make_jaxpr(function)(1.0).eqns
    call, _ = (x.primitive.name for x in equations)  # closed_call up to JAX 0.11
    assert call in _control_flow.PLAIN_CALLS
    (jitted,) = jax.make_jaxpr(jax.jit(lambda x: x))(1.0).eqns
    assert jitted.primitive.name in _control_flow.PLAIN_CALLS


def _twice(_, x):
    return x * 2
