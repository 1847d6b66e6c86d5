"""What an inner optimizer is shown of params and gradients, leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._leaves import is_absent
from optax_mp._tree import PyTree, is_array, is_floating, is_inexact


def own_master(param: Any) -> Any:
    """Return what `inner` sees of a leaf without a master: itself, or nothing."""
    if not is_inexact(param):
        return optax.MaskedNode()
    # NumPy's float64 is float32 to JAX.
    param = param if isinstance(param, jax.Array) else jnp.asarray(param)
    # Moments made from a weakly typed value would turn strong at the first update.
    is_weak = getattr(param, "weak_type", False)
    return jnp.asarray(param, param.dtype) if is_weak else param


def in_precision_of(seen: Any, grad: Any) -> Any:
    """Return the gradient in the dtype of what `inner` sees as its param."""
    if is_absent(seen):
        return seen
    if is_absent(grad) or not (is_floating(grad) and is_floating(seen)):
        return grad
    return grad.astype(seen.dtype)


def without_aliases(state: PyTree, others: PyTree) -> PyTree:
    """Copy what `state` shares with `others` or holds twice, so all can be donated.

    Some optimizers keep the params given to `init`, or the same zeros in two places.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(others)}

    def owned(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        if id(leaf) in taken:
            leaf = jnp.array(leaf, copy=True)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(owned, state)
