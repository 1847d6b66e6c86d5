"""Framework boxes around single arrays, detected structurally.

`nnx.Variable`, Linen's `Partitioned`, haliax's `NamedArray`: a box is a pytree node
with one child, which is a leaf, and is neither a mapping nor a sequence. Frameworks
look into boxes for arrays, and map functions over a state and its shardings. So in our
states a box holds one array, like the param's box. If the array is absent, so is its
box. A module of one array, such as `equinox.nn.Embedding`, passes for a box.

NNX hides its boxes from optax. `plain` does so for functions that take an
`nnx.Optimizer` or a module, without importing Flax.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, SequenceKey, all_leaves, tree_flatten_with_path

from optax_mp.trees._tree import PyTree

# Decides whether an axis of a new length keeps its name, if that means a mesh axis.
Divides = Callable[[Any, int], bool]


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
    """Flatten a tree with boxes for leaves. There are as many as there are leaves."""
    return jax.tree.flatten(tree, is_leaf=is_box)


def content_of(node: Any) -> Any:
    """Return the one child of a node; a leaf itself."""
    return one_level(node)[0][1]


def unbox(slot: Any) -> Any:
    """Return the array in a box; anything else is returned unchanged."""
    return content_of(slot) if is_box(slot) else slot


def put(box: Any, value: Any) -> Any:
    """Return a box like `box` that holds `value`."""
    return jax.tree.structure(box).unflatten([value]) if is_box(box) else value


def put_resized(box: Any, value: Any, divides: Divides) -> Any:
    """Return an array of another shape in a box like `box`.

    The box's names of axes, such as mesh axes, are kept for axes that are as long as
    before, and for a shorter axis if `divides` says so. (A name means a part of the
    mesh; uneven parts are an error.) Axes in front get none.

    Args:
        box: a box, or an array.
        value: an array; its last axes are the last axes of the one in `box`.
        divides: takes the name of an axis, and its new length.
    """
    old = unbox(box)
    if not is_box(box) or value.shape == old.shape:
        return put(box, value)
    more = value.ndim - old.ndim

    def fit(entries: Any) -> Any:
        """Return what is said about the axes of `value`, if `entries` is about axes."""
        if not _is_about_axes(entries, old.ndim):
            return entries
        lengths = zip(entries, old.shape, value.shape[more:], strict=True)
        kept = [_resize(*of_axis, divides) for of_axis in lengths]
        front = [_front(entries, i, n) for i, n in enumerate(value.shape[:more])]
        whole = tuple(front + kept)
        if whole == tuple(entries):
            return entries
        return whole if isinstance(entries, tuple) else type(entries)(*whole)

    if hasattr(box, "get_metadata"):  # a variable of NNX
        metadata = {name: fit(x) for name, x in box.get_metadata().items()}
        # Not by `set_metadata`, which renames entries of older versions of Flax.
        return type(box).from_metadata(value, metadata)
    if dataclasses.is_dataclass(box) and not isinstance(box, type):
        before = {x.name: getattr(box, x.name) for x in dataclasses.fields(box)}
        after = {name: value if x is old else fit(x) for name, x in before.items()}
        changes = {name: x for name, x in after.items() if x is not before[name]}
        if len(changes) > 1:
            return dataclasses.replace(box, **changes)
    # Not by the class itself: what `equinox.nn.Embedding` is made of are no fields.
    return put(box, value)


def _is_about_axes(entries: Any, ndim: int) -> bool:
    """Return whether metadata has an entry for each axis, such as a name."""
    is_spec = isinstance(entries, tuple | jax.sharding.PartitionSpec)
    return is_spec and 0 < ndim == len(entries) and all(map(_is_name, entries))


def _is_name(entry: Any) -> bool:
    # Several mesh axes are a tuple of names.
    return entry is None or isinstance(entry, str | tuple) or _is_axis(entry)


def _is_axis(entry: Any) -> bool:
    return dataclasses.is_dataclass(entry) and hasattr(entry, "size")


def _resize(entry: Any, before: int, after: int, divides: Divides) -> Any:
    if before == after or entry is None:
        return entry
    keeps = divides(getattr(entry, "name", entry), after)
    if _is_axis(entry):
        name = entry.name if keeps else f"{entry.name}_scales"
        return dataclasses.replace(entry, name=name, size=after)
    return entry if keeps else None


def _front(entries: Any, at: int, size: int) -> Any:
    axis = next(filter(_is_axis, entries), None)
    return axis and dataclasses.replace(axis, name=f"stored_{at}", size=size)


def plain_trees(opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return state and params without NNX's boxes, as `plain` does."""
    return plain(opt_state), plain(params, opt_state)


def plain(tree: PyTree, optimizer: Any = None) -> PyTree:
    """Return a state, params, gradients or updates without NNX's boxes.

    Of an `nnx.Optimizer` that is its `opt_state`: it keeps each array there in its own
    Variable, but shows arrays to optax. Of an `nnx.Module` it is the params
    that the optimizer trains, or the `nnx.Param`s if that is no `nnx.Optimizer`.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    if isinstance(tree, nnx.Optimizer):
        tree = tree.opt_state
    elif isinstance(tree, nnx.Module):
        tree = nnx.state(tree, getattr(optimizer, "wrt", nnx.Param))
    # Not by `nnx.as_pure`, which Flax 0.12.0, the newest for JAX 0.8, lacks.
    return jax.tree.map(content_of, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
