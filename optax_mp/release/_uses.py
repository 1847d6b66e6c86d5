"""How often functions with a derivative rule are given some inputs of a jaxpr."""

import math

from optax_mp.core.jax_api import _jaxpr
from optax_mp.jaxprs import _control_flow
from optax_mp.jaxprs._hidden import call_kind
from optax_mp.jaxprs._search import live_equations


def derivative_calls(jaxpr: _jaxpr.AnyJaxpr, *places: int) -> float:
    """Return how often functions with a `custom_vjp` are given some inputs of a jaxpr.

    The number is infinite if it is not known, as in a branch or a loop that ends by a
    condition. It is NaN if anything else reads the inputs, or returns them.

    Args:
        jaxpr: the jaxpr.
        places: the inputs, by their indices.
    """
    jaxpr, _ = _jaxpr.open_jaxpr(jaxpr)
    chosen = {jaxpr.invars[i] for i in places}
    is_returned = any(x in chosen for x in jaxpr.outvars if not _jaxpr.is_literal(x))
    count = math.nan if is_returned else 0.0
    for equation in live_equations(jaxpr):
        reads = [not _jaxpr.is_literal(x) and x in chosen for x in equation.invars]
        if not any(reads):
            continue
        if not _control_flow.has_regions(equation):
            return math.nan
        if call_kind(equation) == "custom_vjp_call":
            count += 1
            continue
        wiring = _control_flow.wiring_of(equation)
        times = (
            math.inf
            if wiring.deciding
            else _control_flow.run_count(equation) or math.inf
        )
        for region in wiring.regions:
            within = [i for i, is_read in enumerate(region.read(reads)) if is_read]
            if calls := derivative_calls(region.jaxpr, *within):
                count += times * calls
    return count
