"""The precision of a value.

Only values that are float32 or float64 as written take part in amp; the precision of
all others is None. A value that takes part is `LOW`, in the compute dtype; `FULL`, as
written; or `Weak`, which is a literal or the repetition of one, and follows the values
that it is combined with.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from optax_mp._jax._jaxpr import is_shaped

LOW = "low"
FULL = "full"


class Weak(NamedTuple):
    """The precision of a literal, or of its repetition; with its value, if known."""

    value: float | None = None


Precision = Weak | str | None
Precisions = tuple[Precision, ...]


def takes_part(atom: Any) -> bool:
    """Return whether amp may choose the precision of a value."""
    return is_shaped(atom.aval) and atom.aval.dtype in (np.float32, np.float64)


def full_precisions(atoms: Iterable[Any]) -> Precisions:
    """Return the precisions that values have as written."""
    return tuple(FULL if takes_part(atom) else None for atom in atoms)


def literal_precision(atom: Any) -> Precision:
    """Return the precision of a literal."""
    if not takes_part(atom):
        return None
    return Weak(float(atom.val)) if np.ndim(atom.val) == 0 else FULL


def without_weak(precisions: Iterable[Precision]) -> Precisions:
    """Return precisions in which literals are full."""
    return tuple(FULL if isinstance(x, Weak) else x for x in precisions)


def widest(precisions: Sequence[Precision]) -> str:
    """Return the precision of an operation on values of these precisions.

    Literals follow the other values; without others they are full. Values that take no
    part are ignored.
    """
    strong = {x for x in precisions if x in (LOW, FULL)}
    return LOW if strong == {LOW} else FULL


def set_all(precision: str, precisions: Iterable[Precision]) -> Precisions:
    """Return `precision` for each value that takes part."""
    return tuple(None if x is None else precision for x in precisions)


def cast(x: Any, dtype: Any) -> Any:
    """Return `x` in another dtype, or as it is for None."""
    if dtype is None:
        return x
    if not isinstance(x, jax.Array):
        # A literal stays a literal: a JAX array would become a constant of the jaxpr.
        return np.asarray(x).astype(dtype)
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)
