"""Multiply and divide trees by a loss scale, and check them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_mp.core import _dtypes
from optax_mp.core.trees import _tree
from optax_mp.core.trees._leaves import is_absent

# In the place of an index, where all leaves are finite. Larger than any index, so that
# the minimum over leaves, and over ranks, is the first leaf that is not.
ALL_FINITE = 2**31 - 1


def multiply(tree: _tree.PyTree, factor: ArrayLike) -> _tree.PyTree:
    """Multiply floating and complex leaves by `factor` `[]`, in float32 or wider."""
    return _multiply(tree, lambda dtype: jnp.asarray(factor, dtype))


def divide(tree: _tree.PyTree, divisor: ArrayLike) -> _tree.PyTree:
    """Divide floating and complex leaves by `divisor` `[]`, in float32 or wider."""
    # Multiply by the reciprocal, which is exact for powers of two: XLA never recomputes
    # a division, so it would store all quotients before the optimizer reads them.
    return _multiply(tree, lambda dtype: 1 / jnp.asarray(divisor, dtype))


def unscale(grads: _tree.PyTree, scale: jax.Array) -> tuple[_tree.PyTree, jax.Array]:
    """Return (`grads` divided by `scale`, index of the first leaf not finite).

    The quotients are checked, not the gradients: divided by a scale below 1, a finite
    gradient can overflow.

    Args:
        grads: the gradients, any pytree.
        scale: float32 `[]`.

    Returns:
        The quotients, each `[...]` in float32 or wider, and the index, int32 `[]`:
        `ALL_FINITE` if all are finite.
    """
    unscaled = divide(grads, scale)
    # With a place for None and `MaskedNode`, so that gradients and params have the same
    # indices: a param that is not trained has None as its gradient.
    leaves = enumerate(jax.tree.leaves(unscaled, is_leaf=is_absent))
    finite = {
        i: _tree.leaf_finite(leaf) for i, leaf in leaves if _dtypes.is_inexact(leaf)
    }
    if not finite:
        return unscaled, jnp.int32(ALL_FINITE)
    indices = jnp.array(list(finite), jnp.int32)
    bad = jnp.where(jnp.stack(list(finite.values())), ALL_FINITE, indices)
    # The minimum, by a sort, for the reason that `all_true` gives.
    return unscaled, lax.sort(bad)[0]


def _multiply(
    tree: _tree.PyTree, factor_as: Callable[[jnp.dtype], jax.Array]
) -> _tree.PyTree:
    factor = cache(factor_as)  # one per dtype, not one per leaf

    def product(leaf: Any) -> Any:
        # A loss may be a Python number.
        if not (_dtypes.is_inexact(leaf) or isinstance(leaf, float)):
            return leaf
        array = jnp.asarray(leaf)
        # A float16 loss of 2 times 65536 is infinite in float16.
        wide = _dtypes.at_least_float32(array.dtype)
        return lax.mul(array.astype(wide), factor(wide))

    return jax.tree.map(product, tree)
