"""Tables in plain text, as the reports print them."""

from collections.abc import Sequence


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
