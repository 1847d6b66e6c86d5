"""The operations between the elements of an array and the scales of its blocks.

They stay calls in a traced step, by which they are known there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SPREAD, MAXIMUM, MINIMUM = "spread_over_blocks", "max_of_blocks", "min_of_blocks"
_NAMES = (SPREAD, MAXIMUM, MINIMUM)


@dataclass(frozen=True)
class Blocks:
    """The blocks of an array, along one axis.

    Attributes:
        axis: the axis.
        size: how many elements a block has; the last one may have fewer.
        length: how many elements the array has along the axis.
    """

    axis: int
    size: int
    length: int

    @classmethod
    def of(cls, shape: tuple[int, ...], scales: tuple[int, ...]) -> "Blocks":
        """Read them off the shapes of an array and of its scales."""
        axes = [i for i in range(len(shape)) if shape[i] != scales[i]]
        axis = axes[0] if axes else len(shape) - 1
        # The only power of two with ceil(length / size) == count. (For a single block
        # larger ones would do as well, and would give the same result.)
        size = 1
        while size * scales[axis] < shape[axis]:
            size *= 2
        return cls(axis, size, shape[axis])

    @property
    def count(self) -> int:
        """Return how many blocks there are along the axis."""
        return -(-self.length // self.size)

    def reduce(self, name: str, values: jax.Array) -> jax.Array:
        """Return `MAXIMUM` or `MINIMUM` of each block; zeros fill up the last one."""
        reduction = jnp.max if name == MAXIMUM else jnp.min

        def reduce(values: jax.Array) -> jax.Array:
            widths = [(0, 0)] * values.ndim
            widths[self.axis] = (0, self.count * self.size - self.length)
            shape = list(values.shape)
            shape[self.axis : self.axis + 1] = [self.count, self.size]
            padded = jnp.pad(values, widths)
            return reduction(padded.reshape(shape), axis=self.axis + 1)

        return _named(name, reduce)(values)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Return for each value the scale of its block."""

        # The scales are repeated instead of reshaping the values to blocks, so that XLA
        # can overwrite the codes in place.
        def spread(scales: jax.Array) -> jax.Array:
            shape = list(scales.shape)
            shape.insert(self.axis + 1, self.size)
            repeated = jnp.broadcast_to(jnp.expand_dims(scales, self.axis + 1), shape)
            shape[self.axis : self.axis + 2] = [self.count * self.size]
            repeated = repeated.reshape(shape)
            return lax.slice_in_dim(repeated, 0, self.length, axis=self.axis)

        return _named(SPREAD, spread)(scales)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as a call of that name."""
    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


def is_block_operation(equation: Any) -> bool:
    """Return whether an equation is a call of one of these."""
    return equation.params.get("name") in _NAMES


def blocks_in(equation: Any) -> Blocks:
    """Return the blocks that such an equation is about."""
    elements, scales = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if equation.params["name"] == SPREAD:
        elements, scales = scales, elements
    return Blocks.of(elements, scales)
