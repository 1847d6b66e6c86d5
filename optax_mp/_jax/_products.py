"""Matrix products and convolutions: how to tell them, and their FLOPs.

A multiplication and an addition are two FLOPs.
"""

import math
from typing import Any

from optax_mp._jax._jaxpr import Equation
from optax_mp._jax._primitives import PRODUCTS

_CONVOLUTION = "conv_general_dilated"
_SPARSE = ("bcoo_dot_general", "bcsr_dot_general")


def is_product(equation: Equation) -> bool:
    """Return whether an equation is a matrix product or a convolution."""
    name = equation.primitive.name
    return name in PRODUCTS or name in _SPARSE


def operand_indices(equation: Equation) -> tuple[int, int]:
    """Return which two inputs a product multiplies."""
    # The sparse operand comes as its entries and their places.
    is_sparse = equation.primitive.name in _SPARSE
    return (0, len(equation.invars) - 1) if is_sparse else (0, 1)


def operands(equation: Equation) -> list[Any]:
    """Return the abstract values that a product multiplies."""
    return [equation.invars[i].aval for i in operand_indices(equation)]


def matrix_sizes(equation: Equation) -> tuple[Any, Any, Any]:
    """Return the rows, contracted size and columns of a `dot_general`, per batch."""
    (contracted, batch) = equation.params["dimension_numbers"]
    left, right = (
        math.prod(n for axis, n in enumerate(x.shape) if axis not in (*inner, *outer))
        for x, inner, outer in zip(operands(equation), contracted, batch, strict=True)
    )
    shape = operands(equation)[0].shape
    return left, math.prod(shape[axis] for axis in contracted[0]), right


def flops_of(equation: Equation) -> int:
    """Return the FLOPs of a product, run once."""
    if equation.primitive.name == _CONVOLUTION:
        return _convolution_flops(equation)
    left, right = operands(equation)
    numbers, groups = equation.params.get("dimension_numbers"), ()
    if ragged := equation.params.get("ragged_dot_dimension_numbers"):
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (_, contracted), (_, batch) = numbers
    fixed = {*contracted, *batch, *groups}
    free = [size for axis, size in enumerate(right.shape) if axis not in fixed]
    # Each row of a ragged product is multiplied with one group.
    return 2 * math.prod(left.shape) * math.prod(free)


def _convolution_flops(equation: Equation) -> int:
    """Return the FLOPs of a convolution, with products of padding.

    Products of the holes of a dilated input, as in the gradient of a strided
    convolution, are not counted.
    """
    numbers = equation.params["dimension_numbers"]
    kernel = operands(equation)[1].shape
    terms = math.prod(kernel[i] for i in numbers.rhs_spec[1:])
    sums = math.prod(equation.outvars[0].aval.shape)
    return 2 * sums * terms // math.prod(equation.params["lhs_dilation"])
