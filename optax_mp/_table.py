"""Tables in plain text, as the reports print them."""

from collections.abc import Sequence

_WIDTH, _LEAST_PATH_WIDTH = 80, 12


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


def align_by_path(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows that begin with paths as lines; long paths lose their beginning."""
    others = align_columns([["", *cells] for _, *cells in rows], left=1)
    width = max(_WIDTH - max(map(len, others)), _LEAST_PATH_WIDTH)
    paths = shorten([path for path, *_ in rows], width)
    pairs = zip(paths, rows, strict=True)
    return align_columns([(path, *cells) for path, (_, *cells) in pairs], left=1)


def shorten(texts: Sequence[str], width: int) -> list[str]:
    """Return the ends of texts that are longer than `width`, or than they must be.

    No two texts become alike.
    """
    while True:
        cut = [x if len(x) <= width else "..." + x[3 - width :] for x in texts]
        if len(set(cut)) == len(set(texts)):
            return cut
        width += 1


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
