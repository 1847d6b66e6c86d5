"""The progress of the demo: one live line in a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from optax_mp._demo.settings import Settings
from optax_mp._demo.train import Moment, Report

LONGEST_BAR = 20
SHORTEST_BAR = 5
# Of the demo's model on two CPU cores with nothing else to do: compiling a run, a step.
COMPILE_SECONDS, STEP_SECONDS = 3.0, 0.004


def expected_seconds(settings: Settings, run_count: int) -> float:
    """Return about how long all runs take on two CPU cores."""
    steps = settings.steps * len(settings.seeds)
    return run_count * (COMPILE_SECONDS + steps * STEP_SECONDS)


def in_words(seconds: float) -> str:
    """Return a time for people, as `40 s` or `5 min`."""
    if seconds < 100:
        return f"{max(10, 10 * round(seconds / 10))} s"
    return f"{round(seconds / 60)} min"


class Clock:
    """Estimates the time that is left from what was needed so far.

    Compiling and steps are counted apart, or the first run would seem to take forever.
    """

    def __init__(
        self, steps: int, run_count: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with the first of `run_count` runs, each of `steps`."""
        self.steps, self.runs_left, self.now = steps, run_count, now
        self.compiling, self.training, self.compiled, self.made = 0.0, 0.0, 0, 0
        self.last_time, self.last = now(), Moment(0)

    def seconds_left(self, moment: Moment) -> float | None:
        """Note a moment; return the seconds left after it, None before the first."""
        passed = self.now() - self.last_time
        self.last_time += passed
        if moment.loss is None:
            self.runs_left -= 1
        elif self.last.loss is None:
            self.compiling, self.compiled = self.compiling + passed, self.compiled + 1
        else:
            self.training += passed
            # The steps that a diverged seed leaves out took no time.
            self.made += 0 if self.last.is_diverged else moment.step - self.last.step
        self.last = moment
        if not self.made:
            return None
        left_here = 0 if moment.is_last else self.steps - moment.step
        steps_left = left_here + self.runs_left * self.steps
        compile_left = self.runs_left + (moment.loss is None)
        return (
            steps_left * self.training / self.made
            + compile_left * self.compiling / self.compiled
        )


def make_progress(
    stream: TextIO, steps: int, names: Sequence[str], clock: Clock | None = None
) -> Report:
    """Return a callback that shows the progress of the named runs.

    `steps` is how many each makes from all seeds together.
    """
    clock = clock or Clock(steps, len(names))
    is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return (
        live_progress(stream, steps, names, clock)
        if is_live
        else plain_progress(stream, steps, names, clock)
    )


def live_progress(
    stream: TextIO, steps: int, names: Sequence[str], clock: Clock
) -> Report:
    """Return a callback that redraws one line per run, within the terminal's width."""
    name_width = max(map(len, names))

    def report(name: str, moment: Moment) -> None:
        # The last column stays free: some terminals break the line after it.
        width = columns(stream) - 1
        start = f"{run_number(name, names)} {name:<{name_width}}"
        end = f"{moment.step}/{steps}  {status(moment)}{left(clock, moment)}"
        # Padded, so that each line covers the one before it.
        line = with_bar(start, end, moment.step / steps, min(width, 79)).ljust(79)
        line_end = "\n" if moment.is_last else ""
        print("\r" + line[:width], end=line_end, file=stream, flush=True)

    return report


def plain_progress(
    stream: TextIO, steps: int, names: Sequence[str], clock: Clock
) -> Report:
    """Return a callback that prints a line after each tenth of a run."""
    shown_tenth = 0

    def report(name: str, moment: Moment) -> None:
        nonlocal shown_tenth
        tenth = 10 * moment.step // steps
        remaining = left(clock, moment)
        if moment.is_last or tenth != shown_tenth and moment.step:
            where = f"{run_number(name, names)} {name}: step {moment.step}/{steps}"
            print(f"{where}, {status(moment)}{remaining}", file=stream, flush=True)
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


def left(clock: Clock, moment: Moment) -> str:
    """Return the time left, as `  0:40 left`, or nothing if it is not known yet."""
    seconds = clock.seconds_left(moment)
    if not seconds:
        return ""
    return f"  {int(seconds) // 60}:{int(seconds) % 60:02} left"


def status(moment: Moment) -> str:
    """Return the loss, and how many steps were skipped if the run has a loss scale."""
    if moment.loss is None:
        return "compiling"
    if moment.is_diverged:
        return "loss nan: stopped"
    parts = [f"loss {moment.loss:.3f}"]
    if moment.loss_scale is not None:
        parts.append(f"skipped {moment.skipped}")
    return "  ".join(parts)


def with_bar(start: str, end: str, share: float, width: int) -> str:
    """Return a bar between two texts, or the texts alone if it would not fit."""
    room = min(width - len(start) - len(end) - len(" [] "), LONGEST_BAR)
    if room < SHORTEST_BAR:
        return f"{start} {end}"
    filled = int(room * share)
    return f"{start} [{'#' * filled}{'.' * (room - filled)}] {end}"
