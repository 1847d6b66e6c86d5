"""The category of this package's warnings, and the line that they point to.

Two warnings of `value_and_grad` depend on what a loss does while it runs: params may be
float32, with float16 only inside `amp`, and a loss may scale itself. So `amp` and
`scale_loss` record what they do for the `value_and_grad` directly around them.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Literal

# A warning points to the first line outside of these packages.
_SKIPPED = {"contextlib", "equinox", "flax", "functools", "jax", "optax", "optax_mp"}


class MixedPrecisionWarning(UserWarning):
    """Something that runs, and is probably a mistake.

    Warnings come while a function is traced or an optimizer is set up, never from a
    compiled step. Silence those that you do not want by category and text.

    Example:
        >>> import warnings
        >>> import optax_mp
        >>> warnings.filterwarnings(
        ...     "ignore", "value_and_grad: .*float16", optax_mp.MixedPrecisionWarning
        ... )
    """


def warn(message: str) -> None:
    """Warn at the line of the user's program that led here.

    Python shows a warning once for each such line, unless a filter says otherwise.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back and _package(frame) in _SKIPPED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MixedPrecisionWarning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


Event = Literal["computes in float16", "scales its loss"]

# What the loss that runs now has done; None outside of `value_and_grad`.
_events: ContextVar[set[Event] | None] = ContextVar("events", default=None)


@contextmanager
def recorded_in(events: set[Event]) -> Iterator[None]:
    """Add to `events` what the loss does that runs in this context."""
    token = _events.set(events)
    try:
        yield
    finally:
        _events.reset(token)


def record_event(event: Event) -> None:
    """Record what the loss that runs now does, if `value_and_grad` runs one."""
    if (events := _events.get()) is not None:
        events.add(event)
