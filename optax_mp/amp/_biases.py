"""Which additions add a bias: an argument with one axis, to a larger array.

For each value that is an argument of the function, or repeats one, we know the least
number of long axes that it has had; None stands for a computed value and for a scalar.
"""

from typing import Any

from optax_mp._jax._jaxpr import Equation, Jaxpr, is_literal
from optax_mp.amp._precision import REPEATS, takes_part

Axes = tuple[int | None, ...]

_FOLLOWED = REPEATS | {"convert_element_type", "slice", "dynamic_slice"}


def axes_of_inputs(jaxpr: Jaxpr) -> Axes:
    """Return the axes of the arguments of a whole function."""
    return tuple(map(_argument_axes, jaxpr.invars))


class Biases:
    """The arguments among the values of one jaxpr, followed through it."""

    def __init__(self, jaxpr: Jaxpr, axes: Axes) -> None:
        """Begin with the axes of its inputs, as its caller knows them."""
        self._axes = {var: _argument_axes(var) for var in jaxpr.constvars}
        for var, count in zip(jaxpr.invars, axes, strict=True):
            self._axes[var] = _least(count, var)

    def of(self, equation: Equation) -> Axes:
        """Return the axes of the inputs of an equation."""
        return tuple(
            None if is_literal(atom) else self._axes.get(atom)
            for atom in equation.invars
        )

    def follow(self, equation: Equation) -> None:
        """Record the outputs of an equation."""
        if equation.primitive.name in _FOLLOWED:
            (output,) = equation.outvars
            self._axes[output] = _least(self.of(equation)[0], output)

    def added_by(self, equation: Equation) -> bool:
        """Return whether an equation adds a bias to something larger.

        An argument as large as the sum is no bias: it may be what is summed up.
        """
        if equation.primitive.name != "add":
            return False
        counts = [count for count in self.of(equation) if count is not None]
        result = _long_axes(equation.outvars[0])
        return any(count <= 1 and count < result for count in counts)


def _argument_axes(var: Any) -> int | None:
    return _long_axes(var) if takes_part(var) and var.aval.ndim else None


def _least(count: int | None, var: Any) -> int | None:
    return None if count is None else min(count, _long_axes(var))


def _long_axes(var: Any) -> int:
    # Nothing but equality: a size may be symbolic.
    return sum(size != 1 for size in var.aval.shape)
