"""Errors for fields of states that have another name now."""

from collections.abc import Callable
from typing import Any, NoReturn


def renamed_field(old: str, new: str) -> Callable[[Any, str], NoReturn]:
    """Return a `__getattr__` that says what the field `old` is called now."""

    def __getattr__(self: Any, name: str) -> NoReturn:
        kind = type(self).__name__
        if name == old:
            raise AttributeError(
                f"{kind}: `{old}` is not a field, expected `{new}`, its new name."
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    return __getattr__
