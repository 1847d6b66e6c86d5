"""Where float32 comes from: of each value, what made it so.

Values are followed from the inputs of a function. A value in float32 has origins: the
arguments, constants and casts that are float32 by themselves, each of which is enough
to make it so. The cast of a 16-bit value that JAX makes because it meets a float32 one
is an effect and no cause, and is left out.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from optax_mp._jax._jaxpr import Equation
from optax_mp._jax._products import is_product
from optax_mp._jax._source import SourceLines, is_promotion, is_transposed, source_lines
from optax_mp.reports._precision_products import is_wide

# More are of no use to a reader. The nearest come first.
_MOST_ORIGINS = 4


@dataclass(frozen=True, eq=False)
class Origin:
    """What is float32 by itself. Two are equal if they are one object.

    Attributes:
        kind: one of `KINDS`.
        name: an argument's path, an operation's name, a number, or a dtype.
        at: the equation whose lines it is written at, unless it is an argument.
        is_effect: whether it follows from something else that is float32, so that it
            counts only where nothing else is known.
    """

    kind: str
    name: str
    at: Equation = None
    is_effect: bool = False

    @property
    def lines(self) -> SourceLines:
        """The lines where it is written."""
        return SourceLines() if self.at is None else source_lines(self.at)


Origins = tuple[Origin, ...]
# Their outputs have the entries of their inputs, moved or cast.
_MOVES = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "name",
    "optimization_barrier", "reshape", "rev", "squeeze", "transpose",
}  # fmt: skip
# The most telling first.
KINDS = (
    "argument", "constant", "operation", "cast", "result", "literal", "promotion",
    "gradient",
)  # fmt: skip


def sort_origins(origins: Origins) -> list[Origin]:
    """Return causes with the most telling first; of several such, the nearest.

    Effects are left out, unless there is nothing else.
    """
    causes = [x for x in origins if not x.is_effect] or origins
    return sorted(causes, key=lambda x: KINDS.index(x.kind))


class Value(NamedTuple):
    """What is known of a value in a jaxpr.

    Attributes:
        origins: what makes it float32, the nearest first.
        source: the variable whose entries it has, perhaps moved or cast; None if it is
            not the same one in all iterations or branches.
        is_computed: whether `source` is not an input of the function.
        is_gradient: whether it depends on the gradient of an output.
    """

    origins: Origins = ()
    source: Any = None
    is_computed: bool = True
    is_gradient: bool = False


def join(values: Sequence[Value]) -> Value:
    """Return what is known of a value that may be any of several."""
    if not values:
        return Value()
    sources = {value.source for value in values}
    return Value(
        union(value.origins for value in values),
        values[0].source if len(sources) == 1 else None,
        any(value.is_computed for value in values),
        any(value.is_gradient for value in values),
    )


def union(groups: Iterable[Origins]) -> Origins:
    """Return the origins in any of several groups."""
    return tuple(dict.fromkeys(x for group in groups for x in group))[:_MOST_ORIGINS]


def meet(values: Sequence[Value]) -> Origins:
    """Return the origins of a value that is computed from several."""
    values = [value for value in values if value.origins]
    if len(values) == 1:
        return values[0].origins
    # What comes from an input is near, and so is what has few origins.
    nearest = sorted(values, key=lambda x: (x.is_computed, len(x.origins)))
    turns = itertools.zip_longest(*(value.origins for value in nearest))
    found = itertools.chain.from_iterable(turns)
    origins = tuple(x for x in dict.fromkeys(found) if x is not None)
    causes = tuple(x for x in origins if not x.is_effect)
    return (causes or origins)[:_MOST_ORIGINS]


class OriginFinder:
    """Finds the origins of values; each origin is one object."""

    def __init__(self) -> None:
        """Begin without origins."""
        self._made: dict[Any, Origin] = {}

    def of_literal(self, atom: Any, at: Equation) -> Value:
        """Return what is known of a number in a jaxpr, which an equation reads."""
        if not is_wide_value(atom):
            return Value()
        return Value((self._make("literal", str(atom.val), at),))

    def of_outputs(
        self,
        equation: Equation,
        inputs: Sequence[Value],
        at: Equation,
        is_backward: bool,
    ) -> list[Value]:
        """Return what is known of the outputs of an equation without regions.

        Args:
            equation: the equation.
            inputs: what is known of its inputs.
            at: the equation whose lines it is written at.
            is_backward: whether what it is inside of is in the backward pass. There,
                casts to float32 follow from a float32 value of the forward pass.
        """
        is_gradient = any(x.is_gradient for x in inputs) or is_transposed(equation)
        is_moved = equation.primitive.name in _MOVES
        origins: Origins | None = None
        outputs = []
        for i, var in enumerate(equation.outvars):
            if origins is None and is_wide_value(var):
                origins = meet(inputs)
                if not origins and not _is_weak(var):
                    origins = (self._start(equation, at, is_backward),)
            moved = inputs[i] if is_moved else Value(source=var)
            own = origins or () if is_wide_value(var) else ()
            outputs.append(Value(own, moved.source, moved.is_computed, is_gradient))
        return outputs

    def _start(self, equation: Equation, at: Equation, is_backward: bool) -> Origin:
        """Return the origin of a value that no input makes float32."""
        is_backward = is_backward or is_transposed(equation)
        kind, name = "operation", equation.primitive.name
        if is_product(equation):
            kind, name = "result", equation.outvars[0].aval.dtype.name
        elif name == "convert_element_type":
            # In the backward pass JAX knows only the lines of the forward pass.
            is_made_by_jax = not is_backward and is_promotion(equation)
            kind = "promotion" if is_made_by_jax else "cast"
            name = equation.outvars[0].aval.dtype.name
        return self._make(kind, name, at, is_backward)

    def _make(
        self, kind: str, name: str, at: Equation, is_backward: bool = False
    ) -> Origin:
        is_effect = is_backward or kind in ("literal", "promotion")
        made = Origin(kind, name, at, is_effect)
        return self._made.setdefault((kind, name, id(at), is_effect), made)


def is_wide_value(atom: Any) -> bool:
    """Return whether a variable or literal of a jaxpr is float32 or wider."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and is_wide(dtype)


def _is_weak(atom: Any) -> bool:
    return getattr(atom.aval, "weak_type", False)
