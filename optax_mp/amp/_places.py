"""Where an equation comes from: its named scopes, and its line of the source."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from optax_mp._jax._jaxpr import Equation, scopes, source_line


class Places:
    """The rules of scopes and lines."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        """Take rules by names of scopes, and by lines such as `model.py:12`."""
        self.names = set(rules)
        self._by_line = {name: rule for name, rule in rules.items() if ":" in name}
        # A name without parts, such as `"/"`, would match everywhere.
        self._by_scope = {
            _parts(name): (name, rule) for name, rule in rules.items() if _parts(name)
        }
        # Cached, because many equations are in the same scopes.
        self._in_scopes = functools.lru_cache(maxsize=1024)(self._look_up)

    def rule_at(self, equation: Equation) -> Any:
        """Return the rule of the outermost scope that has one, or of the line."""
        found = self._in_scopes(scopes(equation))
        if found:
            return found[0][1]
        return self._by_line.get(source_line(equation)) if self._by_line else None

    def names_at(self, equation: Equation) -> set[str]:
        """Return the names of all rules for the place of an equation."""
        named = {name for name, _ in self._in_scopes(scopes(equation))}
        return named | {source_line(equation)} & self.names

    def _look_up(self, stack: str) -> list[tuple[str, Any]]:
        """Return names and rules of scopes, as JAX writes them, outermost first."""
        parts = _parts(stack)
        return [
            found
            for start in range(len(parts))
            for name, found in self._by_scope.items()
            if parts[start : start + len(name)] == name
        ]


def words_at(equation: Equation) -> Iterator[str]:
    """Yield the names that a rule for the place of an equation could have."""
    yield from _parts(scopes(equation))
    yield source_line(equation)


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
