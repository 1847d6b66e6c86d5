"""Objects of Flax NNX as plain trees of arrays, without importing Flax."""

import sys
from typing import Any

import jax

from optax_mp._tree import PyTree


def plain_state(opt_state: PyTree) -> PyTree:
    """Return an optimizer state without NNX's boxes; also that of an `nnx.Optimizer`.

    `nnx.Optimizer` keeps each array of its `opt_state` in a Variable of its own, but
    shows arrays to optax.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return opt_state
    if isinstance(opt_state, nnx.Optimizer):
        opt_state = opt_state.opt_state
    return _unbox(opt_state, nnx)


def plain_trees(opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return state and params without NNX's boxes.

    Of an `nnx.Module` those are the params that the `nnx.Optimizer` trains, or its
    `nnx.Param`s if the state is not given as one.
    """
    return plain_state(opt_state), _plain_params(params, opt_state)


def plain_params(params: PyTree) -> PyTree:
    """Return params, gradients or updates without NNX's boxes."""
    return _plain_params(params, None)


def _plain_params(params: PyTree, optimizer: Any) -> PyTree:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return params
    if isinstance(params, nnx.Module):
        params = nnx.state(params, getattr(optimizer, "wrt", nnx.Param))
    return _unbox(params, nnx)


def _unbox(tree: PyTree, nnx: Any) -> PyTree:
    # Flax before 0.12 has no `as_pure`, and its trees hold `VariableState`s.
    if hasattr(nnx, "as_pure"):
        return nnx.as_pure(tree)
    boxes = (nnx.Variable, nnx.VariableState)
    return jax.tree.map(
        lambda x: x.value if isinstance(x, boxes) else x,
        tree,
        is_leaf=lambda x: isinstance(x, boxes),
    )
