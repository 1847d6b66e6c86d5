"""Where rounding to a low-precision format changes its kind, and bins between."""

import functools
import math
import struct
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
# The exponent of a float32 begins at this bit.
EXPONENT_BIT = 23


class Limits(NamedTuple):
    """The least positive float32 of each kind, rounded to nearest even, as its bits.

    Attributes:
        nonzero: rounds to a number that is not 0.
        normal: rounds to a normal number.
        overflow: rounds to infinity, or to NaN where the format has no infinity.
    """

    nonzero: int
    normal: int
    overflow: int


@functools.cache
def limits_of(name: str) -> Limits:
    """Return the limits of one of `FORMATS`."""
    info = jnp.finfo(name)
    smallest, normal, largest = (
        float(info.smallest_subnormal),
        float(info.smallest_normal),
        float(info.max),
    )
    last_place = math.ldexp(1.0, math.frexp(largest)[1] - 1 - info.nmant)
    # Halfway between two numbers goes to the even one: to 0 and not to the smallest
    # subnormal, to the smallest normal number, and at the upper end away from the
    # largest number, unless that is even (in float8_e4m3fn, where NaN comes next).
    is_even = largest / last_place % 2 == 0
    return Limits(
        nonzero=_pattern(smallest / 2) + 1,
        normal=_pattern(normal - smallest / 2),
        overflow=_pattern(largest + last_place / 2) + is_even,
    )


def _pattern(value: float) -> int:
    """Return the bits of a positive float32, which are in the order of the values."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


@functools.cache
def cuts() -> tuple[int, ...]:
    """Return the bits of the floats at which an octave is cut in two."""
    return tuple(sorted({1, *(x for name in FORMATS for x in limits_of(name))}))


@functools.cache
def bounds() -> tuple[int, ...]:
    """Return the bits of the float at which each bin begins.

    The first bin is of 0, the last of what is not finite. In between a bin is an
    octave, cut in pieces where the rounding of a format changes its kind.
    """
    octaves = (exponent << EXPONENT_BIT for exponent in range(1, 256))
    return tuple(sorted([0, *cuts(), *octaves]))


def values_of(patterns: Any) -> np.ndarray:
    """Return the float32 numbers of these bits, as float64; of infinity, 2^128."""
    values = np.asarray(patterns, np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isinf(values), 2.0**128, values)
