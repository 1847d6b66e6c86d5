"""Facts of each primitive: one table that all analyses read.

A new primitive is one word in one row of `_TABLE`. A primitive that is not listed runs
as written, and analyses know nothing of its outputs. `_control_flow` has the primitives
with jaxprs inside.

At the end are matrix products and convolutions: how to tell them, what they multiply
in, and their FLOPs. A multiplication and an addition are two FLOPs.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from optax_mp.core.jax_api._extend import Primitive
from optax_mp.core.jax_api._extend import primitives as _primitives
from optax_mp.core.jax_api._jaxpr import Equation

# The kinds of primitives.
#
# - moves: the output consists of entries of the first input, perhaps rounded.
# - repeats: moves all of them, unchanged, perhaps several times.
# - hands_on: repeats; each output is the input at its place.
# - joins: puts entries of several inputs into one array.
# - product, factors: a matrix product or convolution of dense operands; a factorization
#   or a solver of linear equations.
#
# How amp runs it by default, in the words of `amp`'s docstring:
#
# - f32: exponentials, logarithms, and sums. If the slope is steep, or many terms add
#   up, 16 bits are too few.
# - f32_if_f16: 256 squared overflows float16; bfloat16 has the range of float32.
# - widest, own, low.
_TABLE = """
-         f32         exp exp2 rsqrt cosh
-         f32         expm1 log1p sinh asinh atan
-         f32         log log2 pow tan asin acos atan2 acosh atanh erf_inv
-         f32         lgamma digamma polygamma igamma igammac
-         f32_if_f16  square
-         f32_if_f16  integer_pow one_minus_square
-         widest      abs sqrt logistic erfc
-         widest      add add_any mul div rem min sign cbrt tanh erf
-         widest      floor ceil round
-         widest      sub neg max sin cos select_n clamp is_finite
-         widest      eq ne lt le gt ge eq_to lt_to le_to
moves     -           convert_element_type reduce_precision
repeats   widest      copy stop_gradient name pvary pcast pbroadcast
repeats   widest      broadcast_in_dim reshape transpose squeeze rev tile
repeats   widest      reshard device_put sharding_constraint
hands_on  own         optimization_barrier optax_mp_place_like
hands_on  own         optax_mp_computed_once
moves     widest      slice dynamic_slice split pad
moves     widest      gather
joins     widest      concatenate dynamic_update_slice
joins     -           scatter
product   low         dot_general
product   low         conv_general_dilated ragged_dot_general
factors   -           cholesky eig eigh lu qr svd triangular_solve schur
factors   -           householder_product geqrf geqp3
-         f32         reduce_sum reduce_prod cumsum cumprod reduce_window_sum
-         f32         cumlogsumexp
-         widest      reduce_max reduce_min cummax cummin psum psum_invariant
-         widest      pmax pmin ppermute all_to_all reduce_scatter all_gather
-         widest      all_gather_invariant
-         widest      reduce_window_max reduce_window_min argmax argmin top_k
-         widest      real
-         own         sort
"""

_ROWS = [line.split() for line in _TABLE.strip().splitlines()]


def _of_kind(kind: str) -> frozenset[str]:
    """Return the primitives of a kind."""
    rows = (row for row in _ROWS if row[0] == kind)
    return frozenset(name for row in rows for name in row[2:])


HANDS_ON = _of_kind("hands_on")
REPEATS = _of_kind("repeats") | HANDS_ON
MOVES = _of_kind("moves") | REPEATS
JOINS, PRODUCTS, FACTORIZATIONS = map(_of_kind, ("joins", "product", "factors"))
# How amp treats a primitive by default. Those not listed run as written.
AMP_WORDS = {name: row[1] for row in _ROWS if row[1] != "-" for name in row[2:]}


def primitive_names() -> set[str]:
    """Return the names of all public primitives of JAX."""
    values = vars(_primitives).values()
    return {value.name for value in values if isinstance(value, Primitive)}


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


# What the algorithms multiply that `precision=` can name. Accelerators round operands
# to it, or cast them up. Those of several products are as exact as float32. Algorithms
# for 8 bits take the operands unchanged.
_ALGORITHMS = """
float16   F16_F16_F16 F16_F16_F32
bfloat16  BF16_BF16_BF16 BF16_BF16_F32
float32   F32_F32_F32 TF32_TF32_F32 TF32_TF32_F32_X3
float32   BF16_BF16_F32_X3 BF16_BF16_F32_X6 BF16_BF16_F32_X9
float64   F64_F64_F64
"""
_ALGORITHM_DTYPES = {
    name: row.split()[0]
    for row in _ALGORITHMS.strip().splitlines()
    for name in row.split()[1:]
}


def algorithm_dtype(equation: Equation) -> Any:
    """Return the dtype that a product's algorithm multiplies in; None without one."""
    precision = equation.params.get("precision")
    if isinstance(precision, lax.DotAlgorithmPreset):
        name = _ALGORITHM_DTYPES.get(precision.name)
        return name and jnp.dtype(name)
    if isinstance(precision, lax.DotAlgorithm):
        if precision.num_primitive_operations > 1:
            return jnp.dtype(jnp.float32)
        types = precision.lhs_precision_type, precision.rhs_precision_type
        return _wider(*[jnp.dtype(each) for each in types])
    return None


def product_dtype(equation: Equation) -> Any:
    """Return the dtype that a product multiplies in.

    It is the wider one of its operands, or its algorithm's: `BF16_BF16_F32` multiplies
    bfloat16 and adds in float32.
    """
    operand_dtypes = [aval.dtype for aval in operands(equation)]
    return algorithm_dtype(equation) or _wider(*operand_dtypes)


def _wider(*dtypes: Any) -> Any:
    return max(dtypes, key=lambda x: (jnp.issubdtype(x, jnp.inexact), x.itemsize))


def flops_of(equation: Equation) -> int:
    """Return the FLOPs of a product, run once."""
    if equation.primitive.name == "conv_general_dilated":
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
