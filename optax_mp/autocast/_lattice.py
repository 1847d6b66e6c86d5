"""The precision of a value.

Only values that are float32 or float64 as written take part in amp; the precision of
all others is None. A value that takes part is `LOW`, in the compute dtype; `FULL`, as
written; `Argument`, also full, which may be a bias; or `Weak`, a literal or a broadcast
of one, which takes the precision of the values that it is combined with.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from optax_mp.core.jax_api._jaxpr import Equation
from optax_mp.jaxprs._tracing import is_shaped

LOW = "low"
FULL = "full"


class Weak(NamedTuple):
    """The precision of a literal, or of its repetition; with its value, if known."""

    value: float | None = None


@dataclass(frozen=True)  # not a tuple, which would equal a `Weak` of the same number
class Argument:
    """The precision of an argument of the function that is only moved, not computed.

    A bias is an argument with one long axis (of a size other than 1) that is added to a
    larger array. It is often a slice of an argument, and is broadcast or reshaped
    before it is added.

    Attributes:
        long_axes: the smallest number of long axes that it has had on the way.
        is_exact: whether the function cast it from the compute dtype, so that casting
            it back loses nothing.
    """

    long_axes: int
    is_exact: bool = False


Precision = Weak | Argument | str | None
Precisions = tuple[Precision, ...]


def takes_part(atom: Any) -> bool:
    """Return whether amp may choose the precision of a value."""
    return is_shaped(atom.aval) and atom.aval.dtype in (np.float32, np.float64)


def full_precisions(atoms: Iterable[Any]) -> Precisions:
    """Return the precisions that values have as written."""
    return tuple(FULL if takes_part(atom) else None for atom in atoms)


def argument_precisions(atoms: Sequence[Any], is_exact: bool = False) -> Precisions:
    """Return the precisions of the arguments of a whole function."""
    return tuple(
        Argument(_long_axes(x), is_exact) if full and x.aval.ndim else full
        for x, full in zip(atoms, full_precisions(atoms), strict=True)
    )


def is_exact(precision: Precision) -> bool:
    """Return whether casting a value to the compute dtype loses nothing."""
    return isinstance(precision, Argument) and precision.is_exact


def moved(precision: Precision, atom: Any) -> Precision:
    """Return the precision of a value, moved to an array of another shape."""
    if not isinstance(precision, Argument):
        return precision
    return replace(precision, long_axes=min(precision.long_axes, _long_axes(atom)))


def adds_bias(equation: Equation, precisions: Precisions) -> bool:
    """Return whether an equation adds a bias to something larger that is low.

    An argument as large as the sum is not a bias: it may be a term of the sum.
    """
    if equation.primitive.name != "add" or LOW not in precisions:
        return False
    result = _long_axes(equation.outvars[0])
    counts = [x.long_axes for x in precisions if isinstance(x, Argument)]
    return any(count <= 1 and count < result for count in counts)


def _long_axes(atom: Any) -> int:
    # Compared for equality only, because a size may be symbolic.
    return sum(size != 1 for size in atom.aval.shape)


def literal_precision(atom: Any) -> Precision:
    """Return the precision of a literal."""
    if not takes_part(atom):
        return None
    if np.ndim(atom.val):
        return FULL
    value = float(atom.val)
    # NaN is not equal to itself, so a cached plan would never match.
    return Weak(None if math.isnan(value) else value)


def as_computed(precisions: Iterable[Precision]) -> Precisions:
    """Return these precisions, with literals and arguments full."""
    return tuple(FULL if isinstance(x, Weak | Argument) else x for x in precisions)


def widest(precisions: Sequence[Precision]) -> str:
    """Return the precision of an operation on values of these precisions.

    Literals follow the other values; without others they are full. Values that take no
    part are ignored.
    """
    strong = {x for x in precisions if not isinstance(x, Weak | None)}
    return LOW if strong == {LOW} else FULL


def set_all(precision: str, precisions: Iterable[Precision]) -> Precisions:
    """Return `precision` for each value that takes part."""
    return tuple(None if x is None else precision for x in precisions)


def cast(x: Any, dtype: Any) -> Any:
    """Return `x` in another dtype."""
    if not isinstance(x, jax.Array):
        # A literal stays a literal: a JAX array would become a constant of the jaxpr.
        return np.asarray(x).astype(dtype)
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)
