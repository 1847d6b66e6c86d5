"""Averages of the weights.

`with_average` keeps a moving average of the weights in the optimizer state, an
`AverageState`; `average_params` reads it, wherever the state is nested.
"""

from optax_mp.averages._average import AverageState

__all__ = ["AverageState"]
