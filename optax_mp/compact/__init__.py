"""Low-bit optimizer states and params.

`low_bit_state` quantizes the large arrays of any optimizer's state to 8 or 16 bits. A
`Quantized` array consists of integer codes and one scale for each block of 32
neighbours, so that one large value costs precision only within its block. Second
moments are never negative, so their codes have no sign and twice the resolution. They
must not round to zero, because optimizers divide by their root. A trace of the update
shows which arrays are never negative, and which must stay in full precision.

`stochastic_rounding` keeps params in 16 bits without masters. Both round
stochastically, up or down at random but right on average, because updates smaller than
half a unit in the last place are lost if they are always rounded to nearest.

- `_low_bit`: the transform.
- `_blocks`: from an array to a `Quantized`, and back.
- `_code_choice`: its settings, and which arrays get which codes. A trace of the update
  shows those that must stay in full precision, and those that are never negative
  (`_signs`).
- `_stochastic`: the other transform.
- `_accumulator`: sums of gradients over micro-batches, in 32 or 16 bits.
- `_random_numbers`: stochastic rounding, for all of them.
"""

from optax_mp.compact._accumulator import AccumulatedGradients
from optax_mp.compact._low_bit import LowBitState
from optax_mp.compact._stochastic import StochasticRoundingState
from optax_mp.trees._quantized import Quantized

__all__ = [
    "AccumulatedGradients",
    "LowBitState",
    "Quantized",
    "StochasticRoundingState",
]
