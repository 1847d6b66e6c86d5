"""Which outputs of a jaxpr are computed from which inputs."""

from collections.abc import Sequence
from typing import Any

from optax_mp._jax._control_flow import has_regions, wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, is_literal, open_jaxpr

# The name of a jit (in `_placement`) whose output is its first input, and which only
# seems to read the second.
PLACE_LIKE = "place_like"


def depending_outputs(
    jaxpr: AnyJaxpr, inputs: Sequence[bool] | None = None
) -> list[bool]:
    """Return which outputs of `jaxpr` depend on its inputs.

    An output depends on what it is computed from, and on what decides how: the index of
    a branch, the condition of a loop.

    Args:
        jaxpr: the jaxpr.
        inputs: for each input whether it counts; by default, all do.
    """
    jaxpr, _ = open_jaxpr(jaxpr)
    counts = [True] * len(jaxpr.invars) if inputs is None else inputs
    known: dict[Any, bool] = dict(zip(jaxpr.invars, counts, strict=True))

    def depends(atom: Any) -> bool:
        return not is_literal(atom) and known.get(atom, False)

    for equation in jaxpr.eqns:
        outputs = _through(equation, [depends(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, outputs, strict=True))
    outvars: Any = jaxpr.outvars
    return [depends(atom) for atom in outvars]


def _through(equation: Equation, sources: list[bool]) -> list[bool]:
    if not (has_regions(equation) and any(sources)):
        return [any(sources)] * len(equation.outvars)
    if equation.params.get("name") == PLACE_LIKE:
        return sources[:1]
    flow = wiring_of(equation).forward(
        sources, lambda region, given: depending_outputs(region.jaxpr, given), any
    )
    return [output or any(flow.decisions) for output in flow.outputs]
