"""Arrays in 8 or 16 bits a value, with a scale for each block of values."""

from typing import NamedTuple

import jax


class Quantized(NamedTuple):
    """An array in few bits, as `low_bit_state` keeps it.

    Attributes:
        codes: an integer for each value, of the array's shape: int8 or int16; uint8 or
            uint16 where no value is negative.
        scales: bfloat16, the largest value of each block of neighbours along one axis.
    """

    codes: jax.Array
    scales: jax.Array
