"""Framework boxes around single arrays, detected structurally.

`nnx.Variable`, Linen's `Partitioned`, haliax's `NamedArray`: a box is a pytree node
with one child, which is a leaf, and is not a mapping or a sequence. Frameworks look
into boxes for arrays, and map functions over a state and its shardings. So in our
states a box holds one array, like the param's box. If the array is absent, so is its
box. A module of one array, such as `equinox.nn.Embedding`, passes for a box.

NNX hides its boxes from optax. `plain` does so for functions that take an
`nnx.Optimizer` or a module, without importing Flax. `boxed_like` undoes it for a state
that `tx.init` made of params in these boxes.
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
    if is_nnx_optimizer(tree):
        tree = tree.opt_state
    tree = params_of(tree, optimizer)
    # Not by `nnx.as_pure`, which Flax 0.12.0, the newest for JAX 0.8, lacks.
    return jax.tree.map(content_of, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def params_of(params: PyTree, optimizer: Any) -> PyTree:
    """Return the params of an `nnx.Module`, in their boxes; other params unchanged."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.Module):
        return params
    return nnx.state(params, getattr(optimizer, "wrt", nnx.Param))


def is_nnx_optimizer(opt_state: Any) -> bool:
    """Return whether an `nnx.Optimizer` was given in the place of a state."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(opt_state, nnx.Optimizer)


def boxed_like(given: PyTree, tree: PyTree) -> PyTree:
    """Return what was computed of `plain(given)` in the boxes of `given`.

    For an `nnx.Optimizer` it stays without boxes, for `nnx.update`.
    """
    if is_nnx_optimizer(given):
        return tree
    return jax.tree.unflatten(jax.tree.structure(given), jax.tree.leaves(tree))
