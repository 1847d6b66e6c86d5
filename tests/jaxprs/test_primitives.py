"""The tables of primitives: no contradictions, and the names of this JAX."""

import jax
from jax import lax

from optax_mp.jaxprs import _control_flow, _primitives


def test_each_primitive_is_in_one_row():
    names = [name for row in _primitives._ROWS for name in row[2:]]
    assert len(names) == len(set(names))


def test_what_repeats_moves():
    assert _primitives.REPEATS < _primitives.MOVES


def test_calls_have_the_names_of_this_jax():
    function = jax.grad(jax.checkpoint(lambda x: lax.fori_loop(0, 3, _twice, x)))
    equations = jax.make_jaxpr(function)(1.0).eqns
    call, _ = (x.primitive.name for x in equations)  # closed_call up to JAX 0.11
    assert call in _control_flow.WITH_REGIONS
    (jitted,) = jax.make_jaxpr(jax.jit(lambda x: x))(1.0).eqns
    assert jitted.primitive.name in _control_flow.WITH_REGIONS


def _twice(_, x):
    return x * 2
