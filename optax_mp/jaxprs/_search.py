"""Look into jaxprs: those inside an equation, and equations at any depth."""

from collections.abc import Callable
from itertools import chain

from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._extend import ClosedJaxpr, Jaxpr


def jaxprs_within(equation: _jaxpr.Equation) -> list[_jaxpr.AnyJaxpr]:
    """Return all jaxprs among the parameters of an equation, whatever their use."""
    params = equation.params.values()
    groups = [x if isinstance(x, tuple | list) else (x,) for x in params]
    return [x for x in chain(*groups) if isinstance(x, Jaxpr | ClosedJaxpr)]


def any_equation(
    jaxpr: _jaxpr.AnyJaxpr, test: Callable[[_jaxpr.Equation], bool]
) -> bool:
    """Return whether a test is true of an equation of a jaxpr, at any depth."""
    return any(
        test(equation) or any(any_equation(x, test) for x in jaxprs_within(equation))
        for equation in _jaxpr.open_jaxpr(jaxpr)[0].eqns
    )


def live_equations(jaxpr: Jaxpr) -> list[_jaxpr.Equation]:
    """Return the equations whose results are used, as only those are compiled."""
    used, live = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(map(id, equation.outvars)):
            live.append(equation)
            used.update(map(id, equation.invars))
    return live[::-1]
