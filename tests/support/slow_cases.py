"""Claims over many cases, of which the default run tries the most telling ones."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    by_default: Callable[..., bool],
    **settings: Any,
) -> pytest.MarkDecorator:
    """Parametrise over `cases`; mark as slow where `by_default` of one is false.

    With several names a case is a tuple, and `by_default` takes its members.
    `settings` are those of `pytest.mark.parametrize`.
    """
    several = not isinstance(names, str)
    parameters = [
        pytest.param(
            *(values := case if several else (case,)),
            marks=() if by_default(*values) else pytest.mark.slow,
        )
        for case in cases
    ]
    if all(parameter.marks for parameter in parameters):
        raise ValueError(f"mostly_slow: the default run has no case of {names}")
    return pytest.mark.parametrize(names, parameters, **settings)
