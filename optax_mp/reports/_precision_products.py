"""The dtype of matrix products and convolutions."""

import functools
from typing import Any

import jax.numpy as jnp

from optax_mp._dtypes import bits
from optax_mp._jax._jaxpr import Equation
from optax_mp._jax._products import operands

_LEAST_WIDE_BITS = 32


def product_dtype(equation: Equation) -> Any:
    """Return the dtype of the operands of a product, the wider if there are two."""
    left, right = (aval.dtype for aval in operands(equation))
    if left == right:
        return left
    if not _have_same_kind(left, right):
        return left if jnp.issubdtype(left, jnp.inexact) else right
    return max(left, right, key=lambda dtype: dtype.itemsize)


def _have_same_kind(left: Any, right: Any) -> bool:
    return jnp.issubdtype(left, jnp.inexact) == jnp.issubdtype(right, jnp.inexact)


@functools.cache
def is_wide(dtype: Any) -> bool:
    """Return whether a dtype is float32 or wider; complex64 is."""
    return jnp.issubdtype(dtype, jnp.inexact) and bits(dtype) >= _LEAST_WIDE_BITS
