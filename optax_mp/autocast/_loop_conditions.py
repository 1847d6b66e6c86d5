"""Loops that may never end under amp: their condition reads what is computed low.

A root finder iterates until its step is below a tolerance. Computed in 16 bits, the
step stops shrinking before that. A condition is told apart from a counter, or from a
search for a token, by what it compares: floats that depend on the floats of the
iteration before, through an operation that runs low.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from optax_mp._jax._control_flow import wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, is_literal, is_shaped, open_jaxpr
from optax_mp._jax._primitives import COMPARISONS
from optax_mp._jax._source import source_line
from optax_mp._jax._wiring import ForwardResult, Region
from optax_mp.autocast._lattice import LOW
from optax_mp.autocast._plan import Action, Plan

# How a value depends on the floats that a loop carries: of two ways the larger counts.
_NOT, _DEPENDS, _DEPENDS_BY_LOW = 0, 1, 2


def loop_warnings(jaxpr: AnyJaxpr, plan: Plan, dtype: Any) -> tuple[str, ...]:
    """Return a warning for each loop whose condition reads what is computed low."""
    epsilon = float(jnp.finfo(dtype).eps)
    texts = (
        f"the while loop{f' at {line}' if line else ''} compares floats that it "
        "computes low to decide whether it goes on. Under amp these have the precision "
        f"of {dtype.name}, {epsilon:.1g}, so the loop may take many more iterations "
        "than in float32, or not converge at all. Put it into `with "
        "optax_mp.amp_stop():`, or raise its tolerance."
        for line in _loops(jaxpr, plan, "")
    )
    return tuple(dict.fromkeys(texts))


def ran_low(action: Action) -> bool:
    """Return whether an operation itself runs in the compute dtype, or in 8 bits."""
    by_function = action.how == "function" and LOW in action.outputs
    return LOW in action.inputs or action.how == "f8" or by_function


def _loops(jaxpr: AnyJaxpr, plan: Plan, around: str) -> Iterator[str]:
    """Yield the lines of such loops; in a derivative rule, one may not be known."""
    if not plan.is_changed:
        return
    for equation, action in zip(open_jaxpr(jaxpr)[0].eqns, plan.actions, strict=True):
        if not action.regions:
            continue
        line = source_line(equation) or around
        wiring = wiring_of(equation)
        if equation.primitive.name == "while":
            start = [_NOT] * len(equation.invars)
            for _, i in wiring.carry:
                start[i] = _DEPENDS if _is_float(equation.invars[i]) else _NOT
            if _DEPENDS_BY_LOW in _through(equation, action, start).decisions:
                yield line
        for region, region_plan in zip(wiring.regions, action.regions, strict=True):
            yield from _loops(region.jaxpr, region_plan.plan, line)


def _through(
    equation: Equation, action: Action, inputs: Sequence[int]
) -> ForwardResult:
    """Follow dependences through an equation with regions."""
    wiring = wiring_of(equation)
    plans = {
        id(region): region_plan.plan
        for region, region_plan in zip(wiring.regions, action.regions, strict=True)
    }

    def outputs_of(region: Region, inputs: Sequence[int]) -> Sequence[int]:
        return _outputs(region.jaxpr, plans[id(region)], inputs)

    return wiring.forward(inputs, outputs_of, max)


def _outputs(jaxpr: AnyJaxpr, plan: Plan, inputs: Sequence[int]) -> list[int]:
    """Return how the outputs of a jaxpr depend on such floats."""
    jaxpr, _ = open_jaxpr(jaxpr)
    depends: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return _NOT if is_literal(atom) else depends.get(atom, _NOT)

    for equation, action in zip(jaxpr.eqns, plan.actions, strict=True):
        if action.regions:
            result = _through(equation, action, list(map(read, equation.invars)))
            # Which branch runs counts as much as what it computes.
            outputs = [max([x, *result.decisions]) for x in result.outputs]
        else:
            outputs = [_result(equation, action, read, x) for x in equation.outvars]
        depends.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _result(equation: Equation, action: Action, read: Any, output: Any) -> int:
    """Return how an output of an equation without regions depends on such floats."""
    atoms = equation.invars
    if equation.primitive.name not in COMPARISONS and not _is_float(output):
        # Neither an argmax, the order of a sort, nor `is_finite` is a test against a
        # tolerance.
        atoms = [atom for atom in atoms if not _is_float(atom)]
    depends = max(map(read, atoms), default=_NOT)
    return _DEPENDS_BY_LOW if depends and ran_low(action) else depends


def _is_float(atom: Any) -> bool:
    return is_shaped(atom.aval) and jnp.issubdtype(atom.aval.dtype, jnp.floating)
