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
    all_hold,
    is_floating,
    is_inexact,
    isfinite_everywhere,
    leaf_finite,
)


def multiply(tree: PyTree, factor: ArrayLike) -> PyTree:
    """Multiply floating and complex leaves by `factor`, in float32 or wider."""
    return _multiply(tree, lambda dtype: jnp.asarray(factor, dtype))


def divide(tree: PyTree, divisor: ArrayLike) -> PyTree:
    """Divide floating and complex leaves by `divisor`, in float32 or wider."""
    # By its reciprocal, which is exact for powers of two: XLA never recomputes a
    # division, so all quotients would be stored before the optimizer reads them.
    return _multiply(tree, lambda dtype: 1 / jnp.asarray(divisor, dtype))


def unscale(grads: PyTree, scale: jax.Array) -> tuple[PyTree, jax.Array]:
    """Return (`grads` divided by `scale`, whether all of these are finite).

    The quotients are checked, not the gradients: by a scale under 1 a finite gradient
    can overflow.
    """
    unscaled = divide(grads, scale)
    both = zip(jax.tree.leaves(grads), jax.tree.leaves(unscaled), strict=True)
    finite = [_finite(x, quotient, scale) for x, quotient in both if is_inexact(x)]
    return unscaled, all_hold(finite)


def _finite(grad: Any, quotient: jax.Array, scale: jax.Array) -> jax.Array:
    if not is_floating(grad):
        return leaf_finite(quotient)  # complex
    if bits(grad.dtype) < 32:
        return isfinite_everywhere(quotient)
    # A division for the check alone: XLA's CPU backend would store `quotient` if it
    # were summed here, which takes 4 bytes per weight and half of a step's time.
    grad = jnp.asarray(grad)
    return leaf_finite(lax.div(grad, lax.convert_element_type(scale, grad.dtype)))


def _multiply(tree: PyTree, factor_as: Callable[[jnp.dtype], jax.Array]) -> PyTree:
    factors: dict[jnp.dtype, jax.Array] = {}  # one for each dtype, not for each leaf

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
