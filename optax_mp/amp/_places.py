"""Where an equation comes from: its named scopes, and its line of the source."""

import contextlib
import functools
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from optax_mp._jax._jaxpr import Equation
from optax_mp._jax._source import calling_lines, scopes, source_line


class Place(NamedTuple):
    """Where an equation comes from, or where a rule applies.

    Attributes:
        scopes: the names of scopes, outermost first.
        lines: lines such as `model.py:12`, outermost first: the last is the equation's
            own, the others call it.
    """

    scopes: tuple[str, ...]
    lines: tuple[str, ...]

    def contains(self, other: "Place", start: int) -> bool:
        """Return whether `other`, from its scope number `start` on, is in this place.

        A place without scopes contains others by their lines, which come after all of
        their scopes.
        """
        if self.lines[-1:] not in ((), other.lines[-1:]):
            return False
        if not set(self.lines) <= set(other.lines):
            return False
        if not self.scopes:
            return start == len(other.scopes)
        return other.scopes[start : start + len(self.scopes)] == self.scopes


class Places:
    """The rules of scopes and lines."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        """Take rules by names of scopes, lines such as `model.py:12`, or both."""
        # A name without parts, such as `"/"`, would match everywhere.
        self._rules = [
            (place, name, rule)
            for name, rule in rules.items()
            if any(place := place_of_name(name))
        ]
        self._has_lines = any(place.lines for place, *_ in self._rules)
        # Cached, because many equations are in the same place.
        self._at_place = functools.lru_cache(maxsize=1024)(self._look_up)

    def rule_at(self, equation: Equation, yielding: Container[Any]) -> Any:
        """Return the rule of the outermost scope that has one, or of the line.

        Those that are `yielding` count only where there is no other.
        """
        found = [rule for _, rule in self._rules_at(equation)]
        others = (rule for rule in found if rule not in yielding)
        return next(others, found[0] if found else None)

    def names_at(self, equation: Equation) -> set[str]:
        """Return the names of all rules for the place of an equation."""
        return {name for name, _ in self._rules_at(equation)}

    def _rules_at(self, equation: Equation) -> list[tuple[str, Any]]:
        # To read lines takes longer.
        lines = calling_lines(equation) if self._has_lines else ()
        return self._at_place(Place(_parts(scopes(equation)), lines))

    def _look_up(self, place: Place) -> list[tuple[str, Any]]:
        """Return names and rules for a place, outermost first."""
        return [
            (name, rule)
            for start in range(len(place.scopes) + 1)
            for of_rule, name, rule in self._rules
            if of_rule.contains(place, start)
        ]


def place_of(equation: Equation) -> Place:
    """Return the place of an equation."""
    return Place(_parts(scopes(equation)), calling_lines(equation))


@functools.lru_cache(maxsize=1024)
def place_of_name(name: str) -> Place:
    """Return the place of a name such as `attention/model.py:12/linear.py:34`."""
    parts = _parts(name)
    is_line = [bool(re.search(r":\d+$", part)) for part in parts]
    count = is_line.index(True) if any(is_line) else len(parts)
    return Place(parts[:count], parts[count:])


def words_at(equation: Equation) -> Iterator[str]:
    """Yield the names that a rule for the place of an equation could have."""
    yield from _parts(scopes(equation))
    yield from calling_lines(equation)


@contextlib.contextmanager
def name_in_errors(equation: Equation) -> Iterator[None]:
    """Add a note to an error raised inside: the innermost operation, and its line."""
    try:
        yield
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        if not any(note.startswith("amp:") for note in notes):
            name = equation.primitive.name
            error.add_note(f"amp: in {name}, written at {source_line(equation)}")
        raise


def _parts(name: str) -> tuple[str, ...]:
    """Return the names in `transpose(jvp(layer))/attention`, outermost first."""
    return tuple(re.findall(r"[^/()]+", name))
