"""Optimizer states as trees: find and map states, and find the param of each leaf."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import (
    GetAttrKey,
    SequenceKey,
    keystr,
    tree_flatten_with_path,
    tree_leaves_with_path,
)

from optax_mp._tree import PyTree

Path = tuple[Any, ...]
Kind = type | tuple[type, ...] | str

_INNER_STATE = GetAttrKey("inner_state")
# Below this field of `MixedPrecisionState` each param may have a small pytree.
_MASTERS = GetAttrKey("master_params")
# Fields that only states of this package have.
_OWN_FIELDS = frozenset({"master_params", "hysteresis_left"})
# The fields of `Quantized`, which stores one array as low-bit codes and their scales.
_CODES_AND_SCALES = (GetAttrKey("codes"),), (GetAttrKey("scales"),)


def find_states(opt_state: PyTree, kind: Kind) -> list[tuple[Path, Any]]:
    """Return every state of `kind` in `opt_state`, outermost first, with its path.

    Args:
        opt_state: an optimizer state, or a tree of several.
        kind: the type of the states to find, a tuple of types, or the name of a type.
            The `inner_state` of a state that was found is searched as well.

    Returns:
        Pairs of a path, as `jax.tree_util.keystr` takes it, and the state there.
    """
    found: list[tuple[Path, Any]] = []
    is_kind = _is_of(kind)

    def collect(tree: PyTree, prefix: Path) -> None:
        for path, node in tree_flatten_with_path(tree, is_leaf=is_kind)[0]:
            if is_kind(node):
                found.append((prefix + path, node))
                if hasattr(node, "inner_state"):
                    collect(node.inner_state, (*prefix, *path, _INNER_STATE))

    collect(opt_state, ())
    return found


def map_states(function: Callable[[Any], Any], opt_state: PyTree, kind: Kind) -> PyTree:
    """Return `opt_state` with each state of `kind` replaced by `function(state)`.

    Args:
        function: takes a state whose `inner_state` is mapped already.
        opt_state: an optimizer state, or a tree of several.
        kind: a type, a tuple of types, or the name of a type.
    """
    is_kind = _is_of(kind)

    def replace(node: Any) -> Any:
        if not is_kind(node):
            return node
        if hasattr(node, "inner_state"):
            mapped = map_states(function, node.inner_state, kind)
            node = node._replace(inner_state=mapped)
        return function(node)

    return jax.tree.map(replace, opt_state, is_leaf=is_kind)


def find_owners(
    tree: PyTree, param_paths: Sequence[Path], params: Sequence[Any]
) -> list[int | None]:
    """Return which param each leaf of `tree` belongs to.

    A subtree like `[0].mu`, whose leaves all have the paths of params, belongs to the
    params leaf by leaf; of nested ones the outermost counts. In the place of a param it
    may have several arrays one level deeper (codes and scales, or the lists of
    `optax.sm3`), and below `master_params` any small pytree.

    Args:
        tree: a state, or any tree that contains trees like the params.
        param_paths: the path of each param in the params.
        params: the param at each path, or anything with its shape. Shapes are compared
            only if the params are a single array, whose empty path fits everywhere.

    Returns:
        For each leaf of `tree` an index into `param_paths`, or None.
    """
    leaves = tree_flatten_with_path(tree)[0]
    by_path = {path: i for i, path in enumerate(param_paths)}
    found: list[int | None] = [None] * len(leaves)

    def owner_below(index: int, depth: int) -> int | None:
        """Return the owner of a leaf if its subtree at `depth` is like the params."""
        path, leaf = leaves[index]
        if _MASTERS in path[:depth]:
            return _owner_of_master(path[depth:], by_path)
        owner = _owner(path[depth:], by_path)
        if owner is None or param_paths[owner] or _fits(path, leaf, params[owner]):
            return owner
        return None

    def is_like_params(indices: list[int], owners: list[int | None]) -> bool:
        if None in owners:
            return False
        # Scalars belong to params only if every param has one. A scalar for some of
        # them is a count, say, in a field that has the name of a param by accident.
        has_scalars = any(
            owner is not None and _shape(params[owner]) and not _shape(leaves[index][1])
            for index, owner in zip(indices, owners, strict=True)
        )
        return not has_scalars or len(set(owners)) == len(by_path)

    def visit(indices: list[int], depth: int) -> None:
        """Set the owners of the leaves of one subtree, or visit its children."""
        owners = [owner_below(index, depth) for index in indices]
        if is_like_params(indices, owners):
            for index, owner in zip(indices, owners, strict=True):
                found[index] = owner
            return
        children: dict[Any, list[int]] = {}
        for index in indices:
            path, _ = leaves[index]
            if len(path) > depth:
                children.setdefault(path[depth], []).append(index)
        for child in children.values():
            visit(child, depth + 1)

    visit(list(range(len(leaves))), 0)
    return found


def _owner(path: Path, by_path: dict[Path, int]) -> int | None:
    """Return the param at a path in a tree like the params, or one step above it."""
    if path[-1:] in _CODES_AND_SCALES:
        path = path[:-1]
    if path in by_path or not path:
        return by_path.get(path)
    *above, last = path
    # In the state of a chain, `[0].count` does not belong to the first of a list of
    # params. So a step below an index must be an index.
    is_below_name = bool(above) and not isinstance(above[-1], SequenceKey)
    if is_below_name or isinstance(last, SequenceKey):
        return by_path.get(tuple(above))
    return None


def _owner_of_master(path: Path, by_path: dict[Path, int]) -> int | None:
    """Return the param at a path in a tree like the params, or anywhere above it."""
    starts = (path[:end] for end in range(len(path) + 1))
    return next((by_path[start] for start in starts if start in by_path), None)


def _fits(path: Path, leaf: Any, param: Any) -> bool:
    """Return whether a leaf has the shape of its param, or stacks arrays of it."""
    own, shape = _shape(leaf), _shape(param)
    is_stack = bool(shape) and own[max(0, len(own) - len(shape)) :] == shape
    return own == shape or is_stack or path[-1:] == _CODES_AND_SCALES[1]


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def holds_state(tree: PyTree) -> bool:
    """Return whether `tree` contains the state of an optimizer, ours or of optax.

    Params may be NamedTuples, too: only the name of a class tells a state from them.
    """

    def is_state(node: Any) -> bool:
        names = (kind.__name__ for kind in type(node).__mro__)
        return hasattr(node, "_fields") and any(x.endswith("State") for x in names)

    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def check_classes(opt_state: PyTree, caller: str) -> None:
    """Raise if a state of ours has lost its class, so that it would not be found.

    So it is if a checkpoint is restored without a template, and for Flax's `nnx.state`
    of an optimizer.
    """
    for path, _ in tree_leaves_with_path(opt_state):
        names = {keystr((key,), simple=True) for key in path}
        fields = sorted(names & _OWN_FIELDS)
        if fields and not any(map(_is_own_field, path)):
            raise ValueError(
                f"{caller}: `opt_state` has {fields[0]!r} in a "
                f"{type(opt_state).__name__}, expected the states as the optimizer "
                "made them; restore the checkpoint into `tx.init(params)`, and pass an "
                "`nnx.Optimizer` itself."
            )


def _is_own_field(key: Any) -> bool:
    return isinstance(key, GetAttrKey) and key.name in _OWN_FIELDS


def _is_of(kind: Kind) -> Callable[[Any], bool]:
    if isinstance(kind, str):
        return lambda node: type(node).__name__ == kind
    return lambda node: isinstance(node, kind)
