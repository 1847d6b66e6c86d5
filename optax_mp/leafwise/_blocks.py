"""The two operations between the elements of an array and the scales of its blocks.

They stay calls in a traced step, by which they are known there.
"""

from collections.abc import Callable
from typing import Any

import jax

SPREAD, MAXIMUM, MINIMUM = "spread_over_blocks", "max_of_blocks", "min_of_blocks"
_NAMES = (SPREAD, MAXIMUM, MINIMUM)


def block_operation(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as a call of that name."""
    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


def is_block_operation(equation: Any) -> bool:
    """Return whether an equation is a call of one of these."""
    return equation.params.get("name") in _NAMES


def block_shape(equation: Any) -> tuple[int, int]:
    """Return along which axis the blocks of such an equation are, and their size."""
    elements, scales = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if equation.params["name"] == SPREAD:
        elements, scales = scales, elements
    return blocks_of(elements, scales)


def blocks_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """Return the axis that has fewer scales than elements, and the size of blocks."""
    axes = [i for i in range(len(shape)) if shape[i] != scales[i]]
    axis = axes[0] if axes else len(shape) - 1
    # The only power of two with ceil(length / size) == count. (For a single block
    # larger ones would do as well, and would give the same result.)
    size = 1
    while size * scales[axis] < shape[axis]:
        size *= 2
    return axis, size
