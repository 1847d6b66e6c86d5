"""Which additions add a bias: an argument with one axis, to a larger array.

A bias is often broadcast or reshaped before it is added. So each argument is followed
through the primitives that only move its entries, with the smallest number of long
axes (of a size other than 1) that it has had on the way.
"""

from typing import Any

import jax.numpy as jnp

from optax_mp._jax._jaxpr import Equation, Jaxpr, is_literal, is_shaped
from optax_mp._jax._primitives import MOVES

# That number for each of several values; None for a computed value, or a scalar.
AxisCounts = tuple[int | None, ...]


def argument_axis_counts(jaxpr: Jaxpr) -> AxisCounts:
    """Return the numbers of long axes of the arguments of a whole function."""
    return tuple(map(_argument_axis_count, jaxpr.invars))


class Biases:
    """The arguments among the values of one jaxpr, followed through it."""

    def __init__(self, jaxpr: Jaxpr, counts: AxisCounts) -> None:
        """Begin with the counts of its inputs, as its caller knows them."""
        self._counts = {var: _argument_axis_count(var) for var in jaxpr.constvars}
        for var, count in zip(jaxpr.invars, counts, strict=True):
            self._counts[var] = _smallest(count, var)

    def counts_of(self, equation: Equation) -> AxisCounts:
        """Return the counts of the inputs of an equation."""
        return tuple(
            None if is_literal(atom) else self._counts.get(atom)
            for atom in equation.invars
        )

    def follow(self, equation: Equation) -> None:
        """Record the outputs of an equation."""
        if equation.primitive.name in MOVES and len(equation.outvars) == 1:
            (output,) = equation.outvars
            self._counts[output] = _smallest(self.counts_of(equation)[0], output)

    def is_added_by(self, equation: Equation) -> bool:
        """Return whether an equation adds a bias to something larger.

        An argument as large as the sum is not a bias: it may be a term of the sum.
        """
        if equation.primitive.name != "add":
            return False
        counts = [count for count in self.counts_of(equation) if count is not None]
        result = _long_axes(equation.outvars[0])
        return any(count <= 1 and count < result for count in counts)


def _argument_axis_count(var: Any) -> int | None:
    # One in 16 bits counts, too: the function may cast it, or JAX to a wider sum.
    is_float = is_shaped(var.aval) and jnp.issubdtype(var.aval.dtype, jnp.floating)
    return _long_axes(var) if is_float and var.aval.ndim else None


def _smallest(count: int | None, var: Any) -> int | None:
    return None if count is None else min(count, _long_axes(var))


def _long_axes(var: Any) -> int:
    # Compared for equality only, because a size may be symbolic.
    return sum(size != 1 for size in var.aval.shape)
