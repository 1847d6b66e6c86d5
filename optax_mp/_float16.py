"""What a function does about float16, as the parts of this package tell that it uses.

`value_and_grad` warns if it finds float16 and no loss scale. But params may be float32,
and float16 only inside, by `amp`; and a function may scale its loss by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Event = Literal["computes in float16", "scales its loss"]

_events: ContextVar[set[Event] | None] = ContextVar("_events", default=None)


@contextmanager
def collect_events() -> Iterator[set[Event]]:
    """Collect what is reported while a function is called or traced."""
    events: set[Event] = set()
    token = _events.set(events)
    try:
        yield events
    finally:
        _events.reset(token)


def report(event: Event) -> None:
    """Tell whoever collects events."""
    events = _events.get()
    if events is not None:
        events.add(event)
