"""Low-bit optimizer states and params.

`low_bit_state` quantizes the large arrays of any optimizer's state to 8 or 16 bits. A
`Quantized` array consists of integer codes and one scale for each line of a matrix.
Second moments are never negative, so their codes have no sign and twice the resolution.
They must not round to zero, because optimizers divide by their root.

`stochastic_rounding` keeps params in 16 bits without masters. Both round at random,
without bias, because updates smaller than half a unit in the last place are lost if
they are always rounded to nearest.

- `_low_bit`: the transform.
- `_quantized`: a low-bit array, the equation of its codes, and its lines.
- `_codes`: from an array to a `Quantized`, and back.
- `_code_choice`: which arrays get which codes, by a trace of the update.
- `_flows`: how arrays of a state reach its next one, for that choice.
- `_scales_in_boxes`: scales in boxes of frameworks.
- `_rounding`: round at random to a dtype.
- `_stochastic`: the other transform.
"""

from optax_mp.compact._low_bit import LowBitState
from optax_mp.compact._quantized import Quantized
from optax_mp.compact._stochastic import StochasticRoundingState

__all__ = ["LowBitState", "Quantized", "StochasticRoundingState"]
