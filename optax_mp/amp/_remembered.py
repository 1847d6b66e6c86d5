"""Remembering what was found of a jaxpr, for as long as the jaxpr is alive."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which is asked once for one jaxpr and the same arguments.

    A jaxpr may hold arrays that a function has closed over: nothing here keeps it.
    """
    found: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def ask(jaxpr: Any, *args: Any) -> Any:
        answers = found.setdefault(jaxpr, {})
        if args not in answers:
            answers[args] = function(jaxpr, *args)
        return answers[args]

    return ask
