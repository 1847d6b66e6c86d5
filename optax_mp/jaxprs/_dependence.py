"""Which inputs of a jaxpr its outputs are computed from, and what joined them."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from optax_mp.core.jax_api import _jaxpr
from optax_mp.jaxprs._control_flow import has_regions, wiring_of
from optax_mp.jaxprs._follow import follow
from optax_mp.jaxprs._primitives import HANDS_ON
from optax_mp.jaxprs._source import function_of

_NONE: frozenset[int] = frozenset()


def depending_outputs(
    jaxpr: _jaxpr.AnyJaxpr, inputs: Sequence[bool] = ()
) -> list[bool]:
    """Return which outputs of `jaxpr` depend on its inputs.

    An output depends on the values it is computed from, also on the index of a branch
    and the condition of a loop.

    Args:
        jaxpr: the jaxpr.
        inputs: for each input, whether to follow it; by default, all.
    """
    followed = inputs or [True] * len(_jaxpr.open_jaxpr(jaxpr)[0].invars)
    own = [Origin(frozenset({0}) if x else _NONE) for x in followed]
    return [bool(x.groups) for x in origins(jaxpr, own)]


class Origin(NamedTuple):
    """Which groups of inputs a value is computed from.

    Attributes:
        groups: their numbers.
        joined_in: where values of several groups first met; `""` if they did not.
    """

    groups: frozenset[int] = _NONE
    joined_in: str = ""

    @staticmethod
    def join(values: Sequence["Origin"], equation: Any = None) -> "Origin":
        """Return the origin of what an equation, or none, makes of several values."""
        groups = _NONE.union(*(x.groups for x in values))
        joined_in = next((x.joined_in for x in values if x.joined_in), "")
        most = max((len(x.groups) for x in values), default=0)
        if equation and not joined_in and len(groups) > most:
            joined_in = function_of(equation)
        return Origin(groups, joined_in)


def origins(
    jaxpr: _jaxpr.AnyJaxpr, inputs: Sequence[Origin], known: Collection[str] = ()
) -> list[Origin]:
    """Return the origins of the outputs of `jaxpr`, given its inputs' origins.

    Results of primitives with a name in `known` count as constants.
    """

    def results(equation: _jaxpr.Equation, inputs: list[Origin]) -> list[Origin]:
        if equation.primitive.name in HANDS_ON:
            return inputs
        if equation.primitive.name in known:
            return [Origin()] * len(equation.outvars)
        if not (has_regions(equation) and any(x.groups for x in inputs)):
            return [Origin.join(inputs, equation)] * len(equation.outvars)
        found = wiring_of(equation).forward(
            inputs,
            lambda region, values: origins(region.jaxpr, values, known),
            Origin.join,
        )
        return [Origin.join([x, *found.decisions], equation) for x in found.outputs]

    return follow(jaxpr, inputs, results, lambda _: Origin())
