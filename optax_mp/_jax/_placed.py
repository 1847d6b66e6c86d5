"""Where a traced function puts its outputs: the shardings it asks for itself."""

from collections.abc import Callable
from typing import Any

from optax_mp._jax._jaxpr import AnyJaxpr, is_literal, open_jaxpr

# Equations whose outputs are their inputs, in the same order.
_HAND_ON = {"copy", "copy_p", "device_put", "optimization_barrier", "shard_alike"}
# The parameter that holds the sharding which an equation asks for.
_ASK = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


def asked_shardings(jaxpr: AnyJaxpr) -> list[Any]:
    """Return for each output the sharding that the function asks for, or None."""
    opened, _ = open_jaxpr(jaxpr)
    outvars: Any = opened.outvars
    return list(map(_search(jaxpr), outvars))


def _search(jaxpr: AnyJaxpr) -> Callable[[Any], Any]:
    opened, _ = open_jaxpr(jaxpr)
    makers = {v: (eqn, i) for eqn in opened.eqns for i, v in enumerate(eqn.outvars)}

    def asked(atom: Any) -> Any:
        if is_literal(atom) or atom not in makers:
            return None
        equation, i = makers[atom]
        name = equation.primitive.name
        if name in _ASK:
            return equation.params[_ASK[name]]
        if name in ("jit", "pjit"):
            return asked_shardings(equation.params["jaxpr"])[i]
        return asked(equation.invars[i]) if name in _HAND_ON else None

    return asked
