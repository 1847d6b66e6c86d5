"""Loops that may never end under amp: their condition reads what is computed low.

A root finder iterates until its step is below a tolerance. Computed in 16 bits, the
step stops shrinking before that. A condition is told apart from a counter, or from a
search for a token, by what it compares: floats that depend on the floats of the
iteration before, through an operation that runs low.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from optax_mp._jax._control_flow import wiring_of
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    is_literal,
    is_shaped,
    open_jaxpr,
)
from optax_mp._jax._primitives import COMPARISONS
from optax_mp._jax._source import source_line
from optax_mp._jax._wiring import ForwardResult, Region
from optax_mp.amp._lattice import LOW
from optax_mp.amp._plan import Action, Plan


class Origin(NamedTuple):
    """What a value depends on, beside the floats that a loop carries.

    Attributes:
        primitive: the first operation between that runs low; empty if there is none.
        line: where it is written.
    """

    primitive: str = ""
    line: str = ""


# None is for a value that does not depend on the floats that the loop carries.
Dependence = Origin | None


def loop_warnings(jaxpr: AnyJaxpr, plan: Plan, dtype: Any) -> tuple[str, ...]:
    """Return a warning for each loop whose condition reads what is computed low."""
    epsilon = float(jnp.finfo(dtype).eps)
    found = (
        f"the while loop{_at(line)} compares floats that depend on {origin.primitive}"
        f"{_at(origin.line)} to decide whether it goes on. Under amp these have the "
        f"precision of {dtype.name}, {epsilon:.1g}, so the loop may take many more "
        "iterations than in float32, or not converge at all. Put it into `with "
        "optax_mp.amp_stop():`, or raise its tolerance."
        for line, origin in _loops(jaxpr, plan, "")
    )
    return tuple(dict.fromkeys(found))


def _at(line: str) -> str:
    # In a derivative rule, the line may not be known.
    return f" at {line}" if line else ""


def ran_low(action: Action) -> bool:
    """Return whether an operation itself runs in the compute dtype, or in 8 bits."""
    by_function = action.how == "function" and LOW in action.outputs
    return LOW in action.inputs or action.how == "f8" or by_function


def _loops(jaxpr: AnyJaxpr, plan: Plan, around: str) -> Iterator[tuple[str, Origin]]:
    """Yield the lines of such loops, and what their conditions depend on."""
    if not plan.is_changed:
        return
    for equation, action in zip(open_jaxpr(jaxpr)[0].eqns, plan.actions, strict=True):
        if not action.regions:
            continue
        line = source_line(equation) or around
        if equation.primitive.name == "while":
            carried = {i for _, i in wiring_of(equation).carry}
            start = [
                Origin() if i in carried and _is_float(atom) else None
                for i, atom in enumerate(equation.invars)
            ]
            condition = _first(_through(equation, action, start).decisions)
            if condition and condition.primitive:
                yield line, condition
        regions = zip(wiring_of(equation).regions, action.regions, strict=True)
        for region, region_plan in regions:
            yield from _loops(region.jaxpr, region_plan.plan, line)


def _through(
    equation: Equation, action: Action, inputs: Sequence[Dependence]
) -> ForwardResult:
    """Follow dependences through an equation with regions."""
    wiring = wiring_of(equation)
    plans = {
        id(region): region_plan.plan
        for region, region_plan in zip(wiring.regions, action.regions, strict=True)
    }

    def outputs_of(
        region: Region, inputs: Sequence[Dependence]
    ) -> Sequence[Dependence]:
        return _outputs(region.jaxpr, plans[id(region)], inputs)

    return wiring.forward(inputs, outputs_of, _first)


def _outputs(
    jaxpr: AnyJaxpr, plan: Plan, inputs: Sequence[Dependence]
) -> list[Dependence]:
    """Return what the outputs of a jaxpr depend on."""
    jaxpr, _ = open_jaxpr(jaxpr)
    known: dict[Any, Dependence] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Dependence:
        return None if is_literal(atom) else known.get(atom)

    for equation, action in zip(jaxpr.eqns, plan.actions, strict=True):
        given = list(map(read, equation.invars))
        if action.regions:
            result = _through(equation, action, given)
            # Which branch runs counts as much as what it computes.
            outputs = [_first([x, *result.decisions]) for x in result.outputs]
        else:
            outputs = [
                _result(equation, action, given, var) for var in equation.outvars
            ]
        known.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _result(
    equation: Equation, action: Action, given: Sequence[Dependence], output: Any
) -> Dependence:
    """Return what an output of an equation without regions depends on."""
    if equation.primitive.name not in COMPARISONS and not _is_float(output):
        # Neither an argmax, the order of a sort, nor `is_finite` is a test against a
        # tolerance.
        pairs = zip(given, equation.invars, strict=True)
        given = [x for x, atom in pairs if not _is_float(atom)]
    found = _first(given)
    if found == Origin() and ran_low(action):
        return Origin(equation.primitive.name, source_line(equation))
    return found


def _first(found: Iterable[Dependence]) -> Dependence:
    """Return the first of these, with an operation that runs low if there is one."""
    known = [x for x in found if x is not None]
    return next((x for x in known if x.primitive), known[0] if known else None)


def _is_float(atom: Any) -> bool:
    return is_shaped(atom.aval) and jnp.issubdtype(atom.aval.dtype, jnp.floating)
