"""Params with one matrix whose state is quantized, and what of a state is."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp.compact import Quantized


def is_quantized(node):
    return isinstance(node, Quantized)


def example(dtype="float32"):
    """Return params with a matrix of which the state is quantized, and a bias."""
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((20, 12)) * 0.1, "b": np.full(12, 0.1)}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)


def quantized_leaves(state):
    """Return what is quantized, by the end of its path, such as `mu['w']`."""
    found = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]
    return {
        jax.tree_util.keystr(path).split(".")[-1]: leaf
        for path, leaf in found
        if is_quantized(leaf)
    }


def kinds(state):
    """Return the dtype of codes of each leaf that is quantized."""
    return {k: q.codes.dtype.name for k, q in quantized_leaves(state).items()}
