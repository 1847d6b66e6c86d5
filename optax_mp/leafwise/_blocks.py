"""The two operations between the elements of an array and the scales of its blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SPREAD, MAXIMUM, MINIMUM = "spread_over_blocks", "max_of_blocks", "min_of_blocks"


def is_block_operation(equation: Any) -> bool:
    """Return whether an equation is a call of one of these."""
    return equation.params.get("name") in (SPREAD, MAXIMUM, MINIMUM)
