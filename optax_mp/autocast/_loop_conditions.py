"""Loops that may never end under amp: their condition reads values computed low.

A root finder iterates until its step is below a tolerance. Computed in 16 bits, the
step may never be that small. A condition counts if it compares floats that depend on
the floats of the iteration before, through an operation that runs low. A counter or a
search for a token does not.
"""

from collections.abc import Sequence, Set
from typing import Any

import jax.numpy as jnp

from optax_mp._jax._control_flow import ForwardResult, has_regions, wiring_of
from optax_mp._jax._dataflow import follow
from optax_mp._jax._jaxpr import Equation
from optax_mp._jax._primitives import COMPARISONS
from optax_mp.autocast._plan import Site
from optax_mp.trees._tree import is_floating

# How a value depends on the floats that a loop carries; of several, the largest counts.
_NOT, _DEPENDS, _DEPENDS_BY_LOW = 0, 1, 2


def loop_warnings(sites: Sequence[Site], dtype: Any) -> tuple[str, ...]:
    """Return a warning for each loop whose condition reads values computed low."""
    epsilon = float(jnp.finfo(dtype).eps)
    low = {id(x.equation) for x in sites if x.action.ran_low}
    loops = (x for x in sites if low and x.equation.primitive.name == "while")
    # In a derivative rule, the line may not be known.
    lines = dict.fromkeys(x.line for x in loops if _compares_low(x.equation, low))
    return tuple(
        f"the while loop{f' at {line}' if line else ''} compares floats that it "
        "computes low to decide whether it goes on. Under amp these have the precision "
        f"of {dtype.name}, {epsilon:.1g}, so the loop may take "
        "many more iterations than in float32, or not converge at all. Put it into "
        "`with optax_mp.amp_stop():`, or raise its tolerance."
        for line in lines
    )


def _compares_low(loop: Equation, low: Set[int]) -> bool:
    """Return whether a while loop goes on by floats that some equations compute."""
    start = [_NOT] * len(loop.invars)
    for _, i in wiring_of(loop).carry:
        start[i] = _DEPENDS if is_floating(loop.invars[i].aval) else _NOT
    return _DEPENDS_BY_LOW in _through(loop, start, low).decisions


def _through(equation: Equation, inputs: Sequence[int], low: Set[int]) -> ForwardResult:
    """Follow dependences through an equation with regions."""

    def results(equation: Equation, inputs: list[int]) -> list[int]:
        if has_regions(equation):
            result = _through(equation, inputs, low)
            # An output also depends on the choice of a branch.
            return [max([x, *result.decisions]) for x in result.outputs]
        return [_result(equation, inputs, low, x) for x in equation.outvars]

    return wiring_of(equation).forward(
        inputs, lambda x, values: follow(x.jaxpr, values, results, lambda _: _NOT), max
    )


def _result(equation: Equation, inputs: list[int], low: Set[int], output: Any) -> int:
    """Return how an output of an equation without regions depends on such floats."""
    if equation.primitive.name not in COMPARISONS and not is_floating(output.aval):
        # An argmax, the order of a sort, or `is_finite` is no test against a tolerance.
        pairs = zip(inputs, equation.invars, strict=True)
        inputs = [x for x, atom in pairs if not is_floating(atom.aval)]
    depends = max(inputs, default=_NOT)
    return _DEPENDS_BY_LOW if depends and id(equation) in low else depends
