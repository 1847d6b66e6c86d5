"""Tables in plain text, as reports print them."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Table(NamedTuple):
    """A part of a report. Printed, it has aligned columns.

    Attributes:
        rows: the cells of each row, the titles first.
        left: how many columns are flush left.
    """

    rows: Sequence[Sequence[str]]
    left: int = 1

    def __str__(self) -> str:
        """Return the table as lines."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = (
            "  ".join(
                cell.ljust(width) if i < self.left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in self.rows
        )
        return "\n".join(line.rstrip() for line in lines)


class Report:
    """Something that prints as lines and tables."""

    def _parts(self) -> Sequence[str | Table]:
        """Return the lines and tables of the report, in their order."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(map(str, self._parts()))


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return items by their key, in the order in which keys first occur."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def axes_or_new(axes: Any) -> Any:
    """Return Matplotlib axes: those given, or of a new figure."""
    # Imported here, because the package does not depend on it.
    return axes or importlib.import_module("matplotlib.pyplot").subplots()[1]


def format_bytes(count: int) -> str:
    """Return bytes in the largest unit that they fill."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def percent(value: float) -> str:
    """Return a share in percent: two digits, and 0 and 100 only for none and all."""
    if 0 < value < 0.001:
        return "<.1"
    return ">99" if 0.995 <= value < 1 else f"{100 * value:.{2 if value < 1 else 3}g}"
