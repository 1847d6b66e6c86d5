"""Checks of the numbers that a user passes to a loss scale.

`argument` names the caller and its argument, as errors begin with them:
"dynamic_loss_scale: `growth_factor`".
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from optax_mp._tree import describe, is_array

# Between these both a scale and its reciprocal are normal float32 numbers: CPUs flush
# smaller ones to zero.
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)
LARGEST_SCALE = 1 / SMALLEST_SCALE


def check_number(
    argument: str, value: Any, expected: str, accept: Callable[[float], bool]
) -> float:
    """Return `value` as a float, or raise an error that says what is `expected`."""
    is_scalar = not is_array(value) or value.shape == ()
    if isinstance(value, str) or not hasattr(value, "__float__") or not is_scalar:
        raise TypeError(f"{argument} is {describe(value)}, expected {expected}.")
    number = float(value)
    if not accept(number):
        raise ValueError(f"{argument} is {value}, expected {expected}.")
    return number


def check_scale(argument: str, value: Any) -> float:
    """Return a loss scale as a float, if it and its reciprocal are normal float32s."""
    return check_number(
        argument,
        value,
        f"a positive finite float32 from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}",
        lambda scale: SMALLEST_SCALE <= scale <= LARGEST_SCALE,
    )


def check_count(argument: str, value: Any) -> float:
    """Return a positive count of steps; whole floats such as 2000.0 are accepted."""

    def is_count(x: float) -> bool:
        return 1 <= x < math.inf and x == int(x)

    return check_number(argument, value, "an integer greater than 0", is_count)


def check_growth_factor(argument: str, value: Any) -> float:
    """Return a growth factor as a float, if it is finite and greater than 1."""
    expected = "a finite number greater than 1"
    return check_number(argument, value, expected, lambda x: 1 < x < math.inf)


def check_backoff_factor(argument: str, value: Any) -> float:
    """Return a backoff factor as a float, if it is between 0 and 1."""
    expected = "a number between 0 and 1"
    return check_number(argument, value, expected, lambda x: 0 < x < 1)
