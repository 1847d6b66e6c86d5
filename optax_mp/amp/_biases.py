"""Which sums add a bias: one axis, given to the function, to a larger array.

Of each value that is given to the function, or repeats what is, we know how many long
axes it had at the least; None stands for a value that is computed, and for a scalar.
"""

from typing import Any

from optax_mp._jax._jaxpr import Equation, Jaxpr, is_literal
from optax_mp.amp._states import REPEATS, takes_part

Axes = tuple[int | None, ...]

_FOLLOWED = REPEATS | {"convert_element_type", "slice", "dynamic_slice"}


def axes_of_inputs(jaxpr: Jaxpr) -> Axes:
    """Return the axes of what is given to a whole function."""
    return tuple(map(_given, jaxpr.invars))


class Biases:
    """The given values of one jaxpr, followed through it."""

    def __init__(self, jaxpr: Jaxpr, axes: Axes) -> None:
        """Begin with the axes of its inputs, as its caller knows them."""
        self._axes = {var: _given(var) for var in jaxpr.constvars}
        for var, count in zip(jaxpr.invars, axes, strict=True):
            self._axes[var] = _least(count, var)

    def of(self, equation: Equation) -> Axes:
        """Return the axes of the inputs of an equation."""
        return tuple(
            None if is_literal(atom) else self._axes.get(atom)
            for atom in equation.invars
        )

    def follow(self, equation: Equation) -> None:
        """Note the outputs of an equation."""
        if equation.primitive.name in _FOLLOWED:
            (output,) = equation.outvars
            self._axes[output] = _least(self.of(equation)[0], output)

    def added_by(self, equation: Equation) -> bool:
        """Return whether an equation adds a bias to something larger.

        One as large as the sum is none: it may be what is summed up.
        """
        if equation.primitive.name != "add":
            return False
        counts = [count for count in self.of(equation) if count is not None]
        result = _long_axes(equation.outvars[0])
        return any(count <= 1 and count < result for count in counts)


def _given(var: Any) -> int | None:
    return _long_axes(var) if takes_part(var) and var.aval.ndim else None


def _least(count: int | None, var: Any) -> int | None:
    return None if count is None else min(count, _long_axes(var))


def _long_axes(var: Any) -> int:
    # A size may be symbolic: it can be compared for equality, and no more.
    return sum(size != 1 for size in var.aval.shape)
