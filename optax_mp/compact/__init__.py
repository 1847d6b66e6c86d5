"""Optimizer states and params in few bits.

`low_bit_state` quantizes the large arrays of any optimizer's state to 8 or 16 bits. A
`Quantized` array is made of integer codes and of one scale for each block of 32
neighbours, so that one large value costs precision only within its block. Signs matter:
a second moment is never negative, so its codes need no sign and have twice the
resolution, and it must not round to zero, because optimizers divide by its root. Which
arrays those are, and which must stay in full precision, is found by tracing the update.

`stochastic_rounding` keeps params in 16 bits without masters. Both round
stochastically, up or down at random but right on average, because updates smaller than
half a unit in the last place are lost if they are always rounded to nearest.
"""

from optax_mp.compact._blocks import Quantized
from optax_mp.compact._low_bit import LowBitState, low_bit_state
from optax_mp.compact._stochastic import StochasticRoundingState, stochastic_rounding

__all__ = [
    "LowBitState",
    "Quantized",
    "StochasticRoundingState",
    "low_bit_state",
    "stochastic_rounding",
]
