"""Trees compared to the last bit, and by their types."""

import jax
import numpy as np


def as_bits(tree):
    """Return the bytes of every leaf with dtype and shape: equal means bit-equal."""
    out = []
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        out.append((array.dtype.name, array.shape, array.tobytes()))
    return out


def avals(tree):
    """Return structure, dtypes, shapes and weak types: equal means no recompilation."""
    return jax.tree.structure(tree), [
        (leaf.dtype, leaf.shape, getattr(leaf, "weak_type", False))
        for leaf in jax.tree.leaves(tree)
    ]
