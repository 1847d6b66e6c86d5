"""Saying in an error which operation failed, and where it is written."""

import contextlib
from collections.abc import Iterator

from optax_mp._jax._jaxpr import Equation, source_line


@contextlib.contextmanager
def located(equation: Equation) -> Iterator[None]:
    """Say in an error raised inside of which equation it is; once, the innermost."""
    try:
        yield
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        if not any(note.startswith("amp:") for note in notes):
            name = equation.primitive.name
            error.add_note(f"amp: in {name}, written at {source_line(equation)}")
        raise
