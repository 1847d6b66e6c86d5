"""Copies of arrays that something else also holds."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_mp.trees._tree import PyTree


def copy_shared(state: PyTree, others: PyTree) -> PyTree:
    """Copy each array of `state` that `others` or another of its leaves also holds.

    Then all can be donated. Some optimizers keep the params given to `init`, or
    the same zeros in two places. Under `jit` a copy costs nothing. Arrays of weak types
    are copied as well, with a strong one.
    """
    seen = {id(leaf) for leaf in jax.tree.leaves(others)}

    def copy_if_seen(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):  # NumPy arrays cannot be donated.
            return leaf
        # A weak type would become a strong one at the first step.
        if id(leaf) in seen or getattr(leaf, "weak_type", False):
            leaf = jnp.array(leaf, leaf.dtype, copy=True)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(copy_if_seen, state)
