"""The shardings that a function asks for its outputs."""

from collections.abc import Sequence
from typing import Any

from optax_mp.core.jax_api import _jaxpr

# The parameter that holds the sharding which an equation asks for.
_ASK = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
# Each output is the input at its place, and stays where that was asked to be.
_COPIES = {
    "copy",
    "copy_p",
    "device_put",
    "optimization_barrier",
    "optax_mp_computed_once",
    "optax_mp_place_like",
}


def asked_shardings(jaxpr: _jaxpr.AnyJaxpr, inputs: Sequence[Any] = ()) -> list[Any]:
    """Return for each output the sharding that a function asks for, or None.

    Args:
        jaxpr: the jaxpr of the function.
        inputs: for each input its sharding, or None; by default, None for all.
    """
    jaxpr, _ = _jaxpr.open_jaxpr(jaxpr)
    inputs = inputs or [None] * len(jaxpr.invars)
    asked = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return None if _jaxpr.is_literal(atom) else asked.get(atom)

    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        outputs = [None] * len(equation.outvars)
        if name in _ASK:
            outputs = [params[_ASK[name]]]
        elif name in _COPIES:
            outputs = list(map(read, equation.invars))
        elif name == "jit":
            outputs = asked_shardings(params["jaxpr"], list(map(read, equation.invars)))
        asked.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))
