"""Multiply and divide trees by a loss scale in float32, and check the result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_mp._dtypes import at_least_float32, bits
from optax_mp._tree import (
    PyTree,
    all_true,
    is_floating,
    is_inexact,
    leaf_finite,
    leaf_finite_without_sum,
)


def multiply(tree: PyTree, factor: ArrayLike) -> PyTree:
    """Multiply floating and complex leaves by `factor`, in float32 or wider."""
    return _multiply(tree, lambda dtype: jnp.asarray(factor, dtype))


def divide(tree: PyTree, divisor: ArrayLike) -> PyTree:
    """Divide floating and complex leaves by `divisor`, in float32 or wider."""
    # Multiply by the reciprocal, which is exact for powers of two: XLA never recomputes
    # a division, so it would store all quotients before the optimizer reads them.
    return _multiply(tree, lambda dtype: 1 / jnp.asarray(divisor, dtype))


def unscale(grads: PyTree, scale: jax.Array) -> tuple[PyTree, jax.Array]:
    """Return (`grads` divided by `scale`, whether all quotients are finite).

    The quotients are checked, not the gradients: divided by a scale below 1, a finite
    gradient can overflow.
    """
    unscaled = divide(grads, scale)
    both = zip(jax.tree.leaves(grads), jax.tree.leaves(unscaled), strict=True)
    finite = [_quotient_finite(*pair, scale) for pair in both if is_inexact(pair[0])]
    return unscaled, all_true(finite)


def _quotient_finite(grad: Any, quotient: jax.Array, scale: jax.Array) -> jax.Array:
    """Return whether all of one quotient is finite."""
    if not is_floating(grad):
        return leaf_finite(quotient)  # complex
    if bits(grad.dtype) < 32:
        return leaf_finite_without_sum(quotient)
    # Divide again, for this check only: if `quotient` were summed here, XLA's CPU
    # backend would store it, for 4 bytes per weight and half of a step's time.
    grad = jnp.asarray(grad)
    return leaf_finite(lax.div(grad, lax.convert_element_type(scale, grad.dtype)))


def _multiply(tree: PyTree, factor_as: Callable[[jnp.dtype], jax.Array]) -> PyTree:
    factors: dict[jnp.dtype, jax.Array] = {}  # one per dtype, not one per leaf

    def product(leaf: Any) -> Any:
        # A loss may be a Python number.
        if not (is_inexact(leaf) or isinstance(leaf, float)):
            return leaf
        array = jnp.asarray(leaf)
        # A float16 loss of 2 times 65536 is infinite in float16.
        wide = at_least_float32(array.dtype)
        if wide not in factors:
            factors[wide] = factor_as(wide)
        return lax.mul(array.astype(wide), factors[wide])

    return jax.tree.map(product, tree)
