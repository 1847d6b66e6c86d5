"""Look into jaxprs: those inside an equation, and equations at any depth."""

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._extend import ClosedJaxpr, Jaxpr, WrappedFun
from optax_mp.jaxprs._tracing import is_shaped

# These hold no jaxpr that JAX would run as a part of an equation. What a function does
# is not known before it is traced.
_WITHOUT = (str, bytes, int, float, type, np.dtype, np.ndarray, np.generic, jax.Array)
_WITHOUT += (FunctionType, MethodType, ModuleType, WrappedFun)


def jaxprs_within(equation: _jaxpr.Equation) -> list[_jaxpr.AnyJaxpr]:
    """Return all jaxprs among the parameters of an equation, whatever their use.

    They are found at any depth: in tuples, dictionaries, and attributes of objects.
    """
    seen: dict[int, Any] = {}
    return [x for each in equation.params.values() for x in _jaxprs_in(each, seen)]


def _jaxprs_in(value: Any, seen: dict[int, Any]) -> Iterator[_jaxpr.AnyJaxpr]:
    """Yield the jaxprs in a value, without what was seen before."""
    if value is None or isinstance(value, _WITHOUT):
        return
    if isinstance(value, Jaxpr | ClosedJaxpr):
        yield value
    elif id(value) not in seen:
        seen[id(value)] = value
        for each in _parts(value):
            yield from _jaxprs_in(each, seen)


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a container holds, or the attributes of an object."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(value, name, None)


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
        # What a loop writes to a reference is not always among its effects.
        acts = equation.effects or not all(is_shaped(x.aval) for x in equation.invars)
        if acts or not used.isdisjoint(map(id, equation.outvars)):
            live.append(equation)
            used.update(map(id, equation.invars))
    return live[::-1]
