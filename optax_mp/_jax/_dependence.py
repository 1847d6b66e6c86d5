"""Which outputs of a jaxpr are computed from which inputs."""

from collections.abc import Sequence
from typing import Any

from optax_mp._jax._control_flow import has_regions, wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, is_literal, open_jaxpr


def depending_outputs(
    jaxpr: AnyJaxpr, inputs: Sequence[bool] | None = None
) -> list[bool]:
    """Return which outputs of `jaxpr` depend on its inputs.

    An output depends on the values it is computed from, and on those that decide what
    runs: the index of a branch, the condition of a loop.

    Args:
        jaxpr: the jaxpr.
        inputs: for each input, whether to look for outputs that depend on it; by
            default, for all.
    """
    jaxpr, _ = open_jaxpr(jaxpr)
    sources = [True] * len(jaxpr.invars) if inputs is None else inputs
    known: dict[Any, bool] = dict(zip(jaxpr.invars, sources, strict=True))

    def depends(atom: Any) -> bool:
        return not is_literal(atom) and known.get(atom, False)

    for equation in jaxpr.eqns:
        inputs = [depends(atom) for atom in equation.invars]
        outputs = _depending_results(equation, inputs)
        known.update(zip(equation.outvars, outputs, strict=True))
    outvars: Any = jaxpr.outvars
    return [depends(atom) for atom in outvars]


def _depending_results(equation: Equation, inputs: list[bool]) -> list[bool]:
    """Return which outputs of an equation depend on something, given its inputs."""
    if equation.primitive.name == "shard_alike":
        return inputs  # it reads one only to tell XLA where to put the other
    if not (has_regions(equation) and any(inputs)):
        return [any(inputs)] * len(equation.outvars)
    result = wiring_of(equation).forward(
        inputs, lambda region, given: depending_outputs(region.jaxpr, given), any
    )
    return [output or any(result.decisions) for output in result.outputs]
