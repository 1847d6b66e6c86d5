"""Optimizer states as trees: find and map states, and find the param of each leaf."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import jax
from jax.tree_util import all_leaves

from optax_mp.core.trees import _boxes
from optax_mp.core.trees._leaves import contents_of
from optax_mp.core.trees._tree import PyTree, ends_in

T = TypeVar("T")
Path = tuple[Any, ...]
Kind = type | tuple[type, ...]


# The fields of each state of this package.
_own_fields: list[frozenset[str]] = []


def own_state(kind: type[T]) -> type[T]:
    """Decorate the state of a wrapper: a NamedTuple with an `inner_state`.

    `check_classes` then knows it by its fields that have no default.
    """
    fields: Any = kind
    _own_fields.append(frozenset(fields._fields) - fields._field_defaults.keys())
    return kind


def inner_field(state: Any, name: str) -> Any:
    """Return a public field of the inner state: `__getattr__` of a wrapper's state.

    Loops read `opt_state.hyperparams` or `opt_state.gradient_step`, and need not know
    which wrappers are around that state.
    """
    inner = state.inner_state
    if not name.startswith("_") and has_field(inner, name):
        return getattr(inner, name)
    raise AttributeError(f"{type(state).__name__} has no field {name!r}")


def has_field(state: Any, name: str) -> bool:
    """Return whether a state has a field, or takes it from the state that it wraps."""
    fields = getattr(type(state), "_fields", ())
    is_wrapper = getattr(type(state), "__getattr__", None) is inner_field
    return name in fields or is_wrapper and has_field(state.inner_state, name)


def find_states(opt_state: PyTree, kind: Kind) -> list[tuple[Path, Any]]:
    """Return every state of `kind` in `opt_state`, outermost first, with its path.

    Args:
        opt_state: an optimizer state, or a tree of several.
        kind: the type of the states to find, or a tuple of types. Such a state is also
            searched inside.

    Returns:
        Pairs of a path, as `jax.tree_util.keystr` takes it, and the state there.
    """
    return [x for x in nodes_of(opt_state) if isinstance(x[1], kind)]


def nodes_of(tree: PyTree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each node of a tree that is not a leaf, with its path, outermost first."""
    if not all_leaves([tree]):
        yield path, tree
        for key, child in _boxes.one_level(tree):
            yield from nodes_of(child, (*path, *key))


def map_states(function: Callable[[Any], Any], opt_state: PyTree, kind: Kind) -> PyTree:
    """Return `opt_state` with each state of `kind` replaced by `function(state)`.

    Args:
        function: takes a state whose `inner_state` is mapped already.
        opt_state: an optimizer state, or a tree of several.
        kind: a type, or a tuple of types.
    """

    def replace(node: Any) -> Any:
        if not isinstance(node, kind):
            return node
        if hasattr(node, "inner_state"):
            mapped = map_states(function, node.inner_state, kind)
            node = node._replace(inner_state=mapped)
        return function(node)

    return jax.tree.map(replace, opt_state, is_leaf=lambda x: isinstance(x, kind))


def find_owners(tree: PyTree, params: PyTree) -> list[int | None]:
    """Return which param each leaf of `tree` belongs to.

    A subtree with the structure of the params, such as `[0].mu`, belongs to the params
    leaf by leaf. For a param it may have nothing, several arrays (codes and scales, the
    lists of `optax.sm3`), or any pytree of arrays whose last axes are the param's. If
    the params are a tuple, the state of a chain with as many links also has their
    structure. It belongs to them leaf by leaf only if no subtree in it does.

    Args:
        tree: a state, or any tree that contains trees like the params.
        params: the params, or a tree of anything with their shapes. If they are a
            single array, the leaves of its shape belong to it, wherever they are.

    Returns:
        For each leaf of `tree` the index of a leaf of `params`, or None.
    """
    slots, treedef = _boxes.flatten_slots(params)
    is_single = len(slots) == 1 and treedef == jax.tree.structure(0)
    belongs = _has_shape_of if is_single else _may_belong

    def match(tree: PyTree) -> list[Any] | None:
        contents = contents_of(tree, params)
        fits = contents is not None and all(map(belongs, contents, slots))
        return contents if fits else None

    def is_above(content: Any) -> bool:
        if _is_leaf_or_box(content):
            return False
        _, *below = nodes_of(content)
        return any(match(node) is not None for _, node in below)

    def find(tree: PyTree) -> list[int | None]:
        contents = match(tree)
        if contents is not None and not any(map(is_above, contents)):
            owners = [[i] * len(jax.tree.leaves(x)) for i, x in enumerate(contents)]
            return list(chain.from_iterable(owners))
        children = [child for path, child in _boxes.one_level(tree) if path]
        if not children:
            return [None] * len(jax.tree.leaves(tree))
        return list(chain.from_iterable(map(find, children)))

    return find(tree)


def _has_shape_of(content: Any, slot: Any) -> bool:
    """Return whether an array belongs to a single param, which fits everywhere."""
    if not _is_leaf_or_box(content):
        return False
    own, shape = jax.tree.leaves(content)[0], _shape(_boxes.unbox(slot))
    return _shape(own) == shape or bool(shape and ends_in(own, shape))


def _may_belong(content: Any, slot: Any) -> bool:
    """Return whether a subtree can be the state of a param."""
    shape, leaves = _shape(_boxes.unbox(slot)), jax.tree.leaves(content)
    if not leaves or _is_leaf_or_box(content):
        return True
    if shape and all(ends_in(x, shape) for x in leaves):
        return True
    # One level of arrays, of which not all are `[]`: those may be the state of a link
    # of a named chain, whose name happens to be a param's.
    is_flat = all(_is_leaf_or_box(child) for _, child in _boxes.one_level(content))
    is_flat = is_flat and not holds_state(content)
    return is_flat and (not shape or any(map(_shape, leaves)))


def _is_leaf_or_box(node: Any) -> bool:
    # A state may keep several arrays in the place of one, and says so by its class.
    is_one_leaf = getattr(node, "is_one_leaf", False)
    return is_one_leaf or _boxes.is_box(node) or all_leaves([node])


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def holds_state(tree: PyTree) -> bool:
    """Return whether `tree` contains the state of an optimizer, ours or of optax.

    Params may also be NamedTuples, and one of a user's may be called `ModelState`.
    """
    return any(
        kind.__name__.endswith("State")
        and kind.__module__.partition(".")[0] in ("optax", "optax_mp")
        for _, node in nodes_of(tree)
        for kind in (type(node).__mro__ if hasattr(node, "_fields") else ())
    )


def check_classes(opt_state: PyTree, caller: str) -> None:
    """Raise if a state of ours has lost its class, so that it would not be found.

    That happens if a checkpoint is restored without a template, and in Flax's
    `nnx.state` of an optimizer.
    """
    nodes = (node for _, node in nodes_of(opt_state) if isinstance(node, Mapping))
    if any(fields <= node.keys() for node in nodes for fields in _own_fields):
        raise ValueError(
            f"{caller}: expected `opt_state` as the optimizer made it, got a "
            f"{type(opt_state).__name__} in which a state has lost its class; restore "
            "the checkpoint into `tx.init(params)`."
        )
