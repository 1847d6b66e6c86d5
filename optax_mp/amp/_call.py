"""A call of a function, traced and planned."""

from collections.abc import Callable, Iterator
from typing import Any

from optax_mp._jax._jaxpr import AnyJaxpr, Equation, jaxprs_within, kind, opened
from optax_mp._jax._traced import Traced
from optax_mp.amp._custom_rules import derivative_of
from optax_mp.amp._places import words_at
from optax_mp.amp._rules import Rules, unknown_names
from optax_mp.amp._run import Interpreter
from optax_mp.amp._states import Plan, written


def planned(
    interpreter: Interpreter, fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Traced, Plan]:
    """Return a call of `fun`, traced, and what becomes of it."""
    traced = Traced.of(lambda given: fun(*given[0], **given[1]), (args, kwargs))
    jaxpr = traced.closed.jaxpr
    _check_names(interpreter.rules, jaxpr)
    return traced, interpreter.plan_call(jaxpr, written(jaxpr.invars))


def _check_names(rules: Rules, jaxpr: AnyJaxpr) -> None:
    """Raise where a rule has a name that is nowhere in a jaxpr."""
    missing = rules.names_to_find
    for equation in _equations(jaxpr) if missing else ():
        missing = missing - rules.names_at(equation)
    if missing:
        seen = {word for each in _equations(jaxpr) for word in words_at(each)}
        raise unknown_names(missing, seen)


def _equations(jaxpr: AnyJaxpr, derivatives: bool = True) -> Iterator[Equation]:
    """Yield all equations, those inside others and in derivative rules, too."""
    for equation in opened(jaxpr)[0].eqns:
        yield equation
        for inner in jaxprs_within(equation):
            yield from _equations(inner, derivatives)
        if derivatives and kind(equation) in ("custom_jvp", "custom_vjp"):
            yield from _equations(derivative_of(equation), derivatives=False)
