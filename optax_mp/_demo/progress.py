"""The progress of the demo: one live line in a terminal, plain lines elsewhere."""

import math
import os
from collections.abc import Sequence
from typing import TextIO

from optax_mp._demo.train import Moment, Report

LONGEST_BAR = 20
SHORTEST_BAR = 5


def make_progress(stream: TextIO, steps: int, names: Sequence[str]) -> Report:
    """Return a callback that shows the progress of the named runs, each of `steps`."""
    is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return (
        live_progress(stream, steps, names)
        if is_live
        else plain_progress(stream, steps, names)
    )


def live_progress(stream: TextIO, steps: int, names: Sequence[str]) -> Report:
    """Return a callback that redraws one line per run, within the terminal's width."""
    name_width = max(map(len, names))

    def report(name: str, moment: Moment) -> None:
        # The last column stays free: some terminals break the line after it.
        width = columns(stream) - 1
        start = f"{run_number(name, names)} {name:<{name_width}}"
        end = f"{moment.step}/{steps}  {status(moment)}"
        # Padded, so that each line covers the one before it.
        line = with_bar(start, end, moment.step / steps, min(width, 79)).ljust(79)
        line_end = "\n" if is_last(moment, steps) else ""
        print("\r" + line[:width], end=line_end, file=stream, flush=True)

    return report


def plain_progress(stream: TextIO, steps: int, names: Sequence[str]) -> Report:
    """Return a callback that prints a line after each tenth of a run."""
    shown_tenth = 0

    def report(name: str, moment: Moment) -> None:
        nonlocal shown_tenth
        tenth = 10 * moment.step // steps
        if is_last(moment, steps) or tenth != shown_tenth and moment.step:
            where = f"{run_number(name, names)} {name}: step {moment.step}/{steps}"
            print(f"{where}, {status(moment)}", file=stream, flush=True)
        shown_tenth = tenth

    return report


def columns(terminal: TextIO) -> int:
    """Return the width of a terminal, or 80 if it does not say."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except OSError:
        return 80


def run_number(name: str, names: Sequence[str]) -> str:
    """Return the number of a run, as `2/6`."""
    return f"{list(names).index(name) + 1}/{len(names)}"


def is_last(moment: Moment, steps: int) -> bool:
    """Return whether a run ends here."""
    return moment.step == steps or moment.is_diverged


def status(moment: Moment) -> str:
    """Return loss, loss scale and skipped steps, if the run has them."""
    if moment.loss is None:
        return "compiling"
    if moment.is_diverged:
        return "loss nan: stopped"
    parts = [f"loss {moment.loss:.3f}"]
    if moment.loss_scale is not None:
        parts.append(f"scale {power_of_two(moment.loss_scale)}")
        parts.append(f"skipped {moment.skipped}")
    return "  ".join(parts)


def power_of_two(scale: float) -> str:
    """Return a loss scale as `2^16`. Those of the demo are powers of two."""
    return f"2^{round(math.log2(scale))}"


def with_bar(start: str, end: str, share: float, width: int) -> str:
    """Return a bar between two texts, or the texts alone if it would not fit."""
    room = min(width - len(start) - len(end) - len(" [] "), LONGEST_BAR)
    if room < SHORTEST_BAR:
        return f"{start} {end}"
    filled = int(room * share)
    return f"{start} [{'#' * filled}{'.' * (room - filled)}] {end}"
