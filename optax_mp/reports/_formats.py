"""The limits of low-precision formats, and histogram bins that respect them."""

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
    """The positive float32 numbers, as bit patterns, where a format's rounding changes.

    Rounding is to nearest, and to even halfway between two numbers.

    Attributes:
        nonzero: the smallest that is rounded to a number other than 0.
        normal: the smallest that is rounded to a normal number.
        overflow: the smallest that is rounded to infinity, or to NaN if the format has
            no infinity.
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
    # Half of the smallest number is rounded to 0, which is even, so that `nonzero` is
    # the next float32. Half a unit below the smallest normal number is rounded up to
    # that. Half a unit above the largest overflows, unless the largest is even (in
    # float8_e4m3fn, where NaN comes next).
    is_even = largest / last_place % 2 == 0
    return Limits(
        nonzero=_bit_pattern(smallest / 2) + 1,
        normal=_bit_pattern(normal - smallest / 2),
        overflow=_bit_pattern(largest + last_place / 2) + is_even,
    )


def _bit_pattern(value: float) -> int:
    """Return the bits of a positive float32 as an integer, ordered as the values."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


@functools.cache
def octave_cuts() -> tuple[int, ...]:
    """Return the bit patterns at which an octave is cut in two bins."""
    return tuple(sorted({1, *(x for name in FORMATS for x in limits_of(name))}))


@functools.cache
def bin_starts() -> tuple[int, ...]:
    """Return the bit pattern of the float32 at which each bin begins.

    The first bin counts 0, the last infinity and NaN. Those in between are octaves,
    from one power of two to the next, cut at the `Limits` of the formats.
    """
    octaves = (exponent << EXPONENT_BIT for exponent in range(1, 256))
    return tuple(sorted([0, *octave_cuts(), *octaves]))


def values_of(patterns: Any) -> np.ndarray:
    """Return the float32 numbers of bit patterns, as float64; 2^128 for infinity."""
    values = np.asarray(patterns, np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isinf(values), 2.0**128, values)
