"""Framework boxes around single arrays, detected structurally.

`nnx.Variable`, Linen's `Partitioned`, haliax's `NamedArray`: a box is a pytree node
with one child, which is a leaf, and is not a mapping or a sequence. Frameworks look
into boxes for arrays, and map functions over a state and its shardings. So in our
states a box holds one array, like the param's box. If the array is absent, so is its
box. A module of one array, such as `equinox.nn.Embedding`, passes for a box.

NNX hides its boxes from optax. `plain` does so for functions that take an
`nnx.Optimizer` or a module, without importing Flax.
"""

import sys
from typing import Any

import jax
from jax.tree_util import DictKey, SequenceKey, all_leaves, tree_flatten_with_path

from optax_mp.core.trees._tree import PyTree


def is_box(node: Any) -> bool:
    """Return whether `node` is a box around one leaf."""
    if isinstance(node, dict | list | tuple) or all_leaves([node]):
        return False
    children = one_level(node)
    if len(children) != 1:
        return False
    (key,), child = children[0]
    return not isinstance(key, DictKey | SequenceKey) and all_leaves([child])


def one_level(node: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the children of a node with their keys; a leaf itself, without a key."""
    return tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]


def flatten_slots(tree: PyTree) -> tuple[list[Any], Any]:
    """Flatten a tree whose leaves are its boxes, or arrays that are not in a box."""
    return jax.tree.flatten(tree, is_leaf=is_box)


def content_of(node: Any) -> Any:
    """Return the one child of a node; a leaf itself."""
    return one_level(node)[0][1]


def unbox(slot: Any) -> Any:
    """Return the array in a box; anything else is returned unchanged."""
    return content_of(slot) if is_box(slot) else slot


def in_box_like(box: Any, value: Any) -> Any:
    """Return a box like `box` that holds `value`."""
    return jax.tree.structure(box).unflatten([value]) if is_box(box) else value


def plain_trees(opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return state and params without NNX's boxes, as `plain` does."""
    return plain(opt_state), plain(params, opt_state)


def plain(tree: PyTree, optimizer: Any = None) -> PyTree:
    """Return a state, params, gradients or updates without NNX's boxes.

    For an `nnx.Optimizer`, return its `opt_state`: it keeps each array there in its own
    Variable, but shows arrays to optax. For an `nnx.Module`, return the params that
    `optimizer` trains, or the `nnx.Param`s if that is not an `nnx.Optimizer`.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    # Not by `nnx.as_pure`, which Flax 0.12.0, the newest for JAX 0.8, lacks.
    return jax.tree.map(
        content_of,
        _tree_of(tree, optimizer, nnx),
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def as_optax_has_them(opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return state and params as the optimizer inside has them, to make a state of it.

    They are plain, but for a state that `tx.init` made of params in NNX's boxes: it has
    boxes of the same types, and the next step wants these.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return opt_state, params
    trees = _tree_of(opt_state, None, nnx), _tree_of(params, opt_state, nnx)

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    of_state, of_params = (
        {type(x) for x in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(x)}
        for tree in trees
    )
    if of_state and of_state <= of_params:
        return trees
    return plain(trees[0]), plain(trees[1])


def _tree_of(tree: PyTree, optimizer: Any, nnx: Any) -> PyTree:
    """Return the state of an `nnx.Optimizer`, or the params of an `nnx.Module`."""
    if isinstance(tree, nnx.Optimizer):
        return tree.opt_state
    if isinstance(tree, nnx.Module):
        return nnx.state(tree, getattr(optimizer, "wrt", nnx.Param))
    return tree
