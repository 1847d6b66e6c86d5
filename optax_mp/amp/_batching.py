"""Functions with batching rules of their own: amp runs the rules as well."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.custom_batching

from optax_mp._jax._control_flow import vmap_by_rule
from optax_mp._jax._jaxpr import Equation
from optax_mp.amp._derivatives import Call, Interpret
from optax_mp.amp._precision import cast


def custom_vmap(
    equation: Equation, call: Call, output_dtypes: Sequence[Any], interpret: Interpret
) -> Call:
    """Return `call` with the rule of a custom_vmap; its outputs have these dtypes."""
    dtypes = [atom.aval.dtype for atom in equation.invars]

    def rule(size: int, is_batched: list[bool], *given: Any) -> tuple[Any, Any]:
        is_output_batched: list[bool] = []

        def batched(inputs: Sequence[Any]) -> list[Any]:
            nonlocal is_output_batched
            outputs, is_output_batched = vmap_by_rule(
                equation, size, is_batched, inputs
            )
            return outputs

        outputs, _ = interpret(batched, (list(given),), (dtypes,))
        return list(map(cast, outputs, output_dtypes)), is_output_batched

    function = jax.custom_batching.custom_vmap(call)
    function.def_vmap(rule)
    return function
