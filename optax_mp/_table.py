"""Reports: tables in plain text, as they print, and in HTML, as notebooks show them."""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple, TypeVar

_WIDTH, _LEAST_WIDTH = 80, 12
T = TypeVar("T")


class Table(NamedTuple):
    """A part of a report.

    Attributes:
        rows: the cells of each row, the titles first.
        left: how many columns are flush left.
        long: the column whose cells are shortened where the text is too long.
        width: the most that they may take; None for what the others leave of a line.
    """

    rows: Sequence[Sequence[str]]
    left: int = 1
    long: int = 0
    width: int | None = None

    def as_text(self) -> str:
        """Return the table as aligned lines."""
        rows = [list(row) for row in self.rows]
        width = self.width
        if width is None:
            others = [row[: self.long] + [""] + row[self.long + 1 :] for row in rows]
            width = _WIDTH - max(map(len, align_columns(others, self.left)))
        cells = shorten([row[self.long] for row in rows], max(width, _LEAST_WIDTH))
        for row, cell in zip(rows, cells, strict=True):
            row[self.long] = cell
        return "\n".join(align_columns(rows, self.left))

    def as_html(self) -> str:
        """Return the table with all cells in full."""
        sides = ["left" if i < self.left else "right" for i in range(len(self.rows[0]))]

        def line(cells: Sequence[str], tag: str) -> str:
            pairs = zip(sides, cells, strict=True)
            made = (f'<{tag} align="{side}">{escape(x)}</{tag}>' for side, x in pairs)
            return f"<tr>{''.join(made)}</tr>"

        titles, *others = self.rows
        body = "".join(line(cells, "td") for cells in others)
        return f"<table>{line(titles, 'th')}{body}</table>"


class Report:
    """Something that is printed as text, and shown as HTML in a notebook."""

    def _parts(self) -> Sequence[str | Table]:
        """Return the lines and tables of the report, in their order."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(
            x if isinstance(x, str) else x.as_text() for x in self._parts()
        )

    def _repr_html_(self) -> str:
        return "".join(
            f"<pre>{escape(x)}</pre>" if isinstance(x, str) else x.as_html()
            for x in self._parts()
        )


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


def align_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return rows of cells as lines; the first `left` columns are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def shorten(texts: Sequence[str], width: int) -> list[str]:
    """Return texts, with dots where they are longer than `width`, or than they must be.

    Of a path, the keys that most texts have in the same place go first, so that the
    keys that tell them apart stay. No two texts become alike.
    """
    keys = [re.findall(r"\[[^\]]*\][^\[]*|[^\[]+", text) for text in texts]
    shared = Counter(place for each in keys for place in enumerate(each))
    while True:
        cut = [_shorten_path(each, width, shared) for each in keys]
        if len(set(cut)) == len(set(texts)):
            return cut
        width += 1


def _shorten_path(
    keys: Sequence[str], width: int, shared: Counter[tuple[int, str]]
) -> str:
    """Return a path without the keys that most others share, but for the last."""
    kept: dict[int, str] = dict(enumerate(keys))
    for place in sorted(range(len(keys) - 1), key=lambda i: -shared[i, keys[i]]):
        if len(text := "".join(kept.values())) <= width:
            return text
        kept[place] = "" if kept.get(place - 1) in ("", "...") else "..."
        if kept.get(place + 1) == "...":
            kept[place + 1] = ""
    text = "".join(kept.values())
    return text if len(text) <= width else "..." + text[3 - width :]


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
