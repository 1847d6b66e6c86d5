"""The progress of the demo: one live line in a terminal, plain lines elsewhere."""

import math
import os
from collections.abc import Sequence
from typing import TextIO

from optax_mp._demo.train import Moment, Report

LONGEST_BAR = 20
SHORTEST_BAR = 5


def make_progress(stream: TextIO, steps: int, names: Sequence[str]) -> Report:
    """Return what shows the progress of the runs called `names`, each of `steps`."""
    is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return (
        live_progress(stream, steps, names)
        if is_live
        else plain_progress(stream, steps, names)
    )


def live_progress(stream: TextIO, steps: int, names: Sequence[str]) -> Report:
    """Return what redraws one line for each run, within the width of the terminal."""
    name_width = max(map(len, names))

    def report(name: str, moment: Moment) -> None:
        # The last column stays free: some terminals break the line after it.
        width = columns(stream) - 1
        start = f"{spell(name, names)} {name:<{name_width}}"
        end = f"{moment.step}/{steps}  {status(moment)}"
        # Padded, since each line is to cover the one before it.
        line = with_bar(start, end, moment.step / steps, min(width, 79)).ljust(79)
        line_end = "\n" if is_last(moment, steps) else ""
        print("\r" + line[:width], end=line_end, file=stream, flush=True)

    return report


def plain_progress(stream: TextIO, steps: int, names: Sequence[str]) -> Report:
    """Return what prints a line when a run has made another tenth of its steps."""
    shown_tenth = 0

    def report(name: str, moment: Moment) -> None:
        nonlocal shown_tenth
        tenth = 10 * moment.step // steps
        if is_last(moment, steps) or tenth != shown_tenth and moment.step:
            where = f"{spell(name, names)} {name}: step {moment.step}/{steps}"
            print(f"{where}, {status(moment)}", file=stream, flush=True)
        shown_tenth = tenth

    return report


def columns(terminal: TextIO) -> int:
    """Return the width of a terminal, or 80 if it does not say."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except OSError:
        return 80


def spell(name: str, names: Sequence[str]) -> str:
    """Return which of the runs one is, as `2/6`."""
    return f"{list(names).index(name) + 1}/{len(names)}"


def is_last(moment: Moment, steps: int) -> bool:
    """Tell whether a run ends here."""
    return moment.step == steps or moment.is_lost


def status(moment: Moment) -> str:
    """Return loss, scale and skipped steps, as far as there are any."""
    if moment.loss is None:
        return "compiling"
    if moment.is_lost:
        return "loss nan: stopped"
    parts = [f"loss {moment.loss:.3f}"]
    if moment.loss_scale is not None:
        parts.append(f"scale {power_of_two(moment.loss_scale)}")
        parts.append(f"skipped {moment.skipped}")
    return "  ".join(parts)


def power_of_two(scale: float) -> str:
    """Return a loss scale as `2^16`: those of the demo are powers of two."""
    return f"2^{round(math.log2(scale))}"


def with_bar(start: str, end: str, share: float, width: int) -> str:
    """Return a bar between two texts, or the texts alone where it would not fit."""
    room = min(width - len(start) - len(end) - len(" [] "), LONGEST_BAR)
    if room < SHORTEST_BAR:
        return f"{start} {end}"
    filled = int(room * share)
    return f"{start} [{'#' * filled}{'.' * (room - filled)}] {end}"
