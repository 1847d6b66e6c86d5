"""The leaves of a tree with their paths, and other trees matched to it leaf by leaf.

If the tree has boxes (see `_boxes.py`), a leaf is matched with its box.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from numbers import Number
from typing import Any

import jax
import optax
from jax.tree_util import DictKey, SequenceKey, all_leaves, tree_flatten_with_path

from optax_mp._jax._arrays import describe, is_array
from optax_mp.trees._boxes import (
    content_of,
    flatten_slots,
    is_box,
    one_level,
    put,
    put_resized,
)
from optax_mp.trees._tree import PyTree, as_array, is_floating, spell

# The types of nodes that stand for nothing, and the keys of dicts and sequences.
ABSENT = (type(None), optax.MaskedNode)
_PLAIN_KEYS = frozenset((DictKey, SequenceKey))


def is_absent(leaf: Any) -> bool:
    """Return whether `leaf` stands for nothing: None or `optax.MaskedNode()`."""
    return isinstance(leaf, ABSENT)


def contents_of(tree: PyTree, like: PyTree) -> list[Any] | None:
    """Return the subtree of `tree` for each leaf or box of another tree.

    An absent node may stand for a whole branch. If the structures differ, return None.
    """
    if is_box(like) or all_leaves([like]):
        return [tree]
    if is_absent(tree):
        return [tree] * len(flatten_slots(like)[0])
    own, theirs = one_level(like), one_level(tree)
    # Not by what else is in the structure: a box may say something else of each array.
    if type(tree) is not type(like) or [k for k, _ in theirs] != [k for k, _ in own]:
        return None
    if not own or not own[0][0]:
        return []
    below = [contents_of(a, b) for (_, a), (_, b) in zip(theirs, own, strict=True)]
    return None if None in below else list(chain.from_iterable(filter(None, below)))


@dataclass(frozen=True)
class Leaves:
    """The leaves of one tree, which other trees are matched to.

    Attributes:
        caller: the public function that the user called, for error messages.
        name: what error messages call the tree.
        paths: the path of each leaf, as `jax.tree_util.keystr` takes it.
        values: the leaves. A Python float is an array, as under `jit`.
        slots: each leaf in its box, if it has one.
        treedef: the structure above the slots.
    """

    caller: str
    name: str
    paths: list[tuple[Any, ...]]
    values: list[Any]
    slots: list[Any]
    treedef: Any

    @classmethod
    def of(cls, tree: PyTree, *, caller: str, name: str = "`params`") -> "Leaves":
        """Flatten `tree`."""
        paths_and_leaves, treedef = tree_flatten_with_path(tree)
        paths = [path for path, _ in paths_and_leaves]
        values = [as_array(leaf) for _, leaf in paths_and_leaves]
        # Leaves that only dicts and sequences hold are in no box.
        if _PLAIN_KEYS.issuperset([type(path[-1]) for path in paths if path]):
            return cls(caller, name, paths, values, values, treedef)
        return cls(caller, name, paths, values, *flatten_slots(tree))

    @property
    def has_boxes(self) -> bool:
        """Whether some leaf may be in a box."""
        return self.slots is not self.values

    def match(self, tree: PyTree, name: str) -> list[Any]:
        """Return what `tree` has at each leaf: a leaf, None or a `MaskedNode`."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef == self.treedef:
            return leaves
        matched = self.match_subtrees(tree, name)
        for path, leaf in zip(self.paths, matched, strict=True):
            if not (is_absent(leaf) or all_leaves([leaf])):
                raise ValueError(
                    f"{self.caller}: expected {name} at {spell(path)} to be a leaf, got"
                    f" a {type(leaf).__name__}; with Flax NNX, use `nnx.as_pure`."
                )
        return matched

    def match_arrays(self, tree: PyTree, name: str) -> list[Any]:
        """Return what `tree` has at each leaf; raise unless shape and dtype agree.

        One float may have another dtype than the other. A plain number is a scalar.
        """
        matched = self.match(tree, name)
        for path, want, leaf in zip(self.paths, self.values, matched, strict=True):
            if not is_array(want) or isinstance(leaf, Number) and not want.shape:
                continue
            same = getattr(leaf, "shape", None) == want.shape
            if not (is_floating(leaf) and is_floating(want)):
                same &= getattr(leaf, "dtype", None) == want.dtype
            if not same:
                raise ValueError(
                    f"{self.caller}: expected {name} at {spell(path)} to be "
                    f"{describe(want)}, as in {self.name}, got {describe(leaf)}."
                )
        return matched

    def match_subtrees(self, tree: PyTree, name: str) -> list[Any]:
        """Return the subtree of `tree` in each slot, without boxes."""
        try:
            contents: list[Any] | None = self.treedef.flatten_up_to(tree)
        except (ValueError, TypeError, KeyError):
            # `optax.masked` may hide a whole branch by one `MaskedNode`.
            contents = contents_of(tree, self.treedef.unflatten(self.slots))
        if contents is not None and not self.has_boxes:
            return contents
        pairs = zip(self.slots, contents or [], strict=False)
        lacks_box = (is_box(a) and is_array(x) and not is_box(x) for a, x in pairs)
        if contents is None or any(lacks_box):
            raise ValueError(self._describe_mismatch(tree, name))
        return list(map(_open, self.slots, contents))

    def unflatten(self, values: Iterable[Any]) -> PyTree:
        """Return a tree of this structure; a `MaskedNode` takes the place of its box.

        For a value of several arrays, each gets its own box.
        """
        if self.has_boxes:
            values = map(_close, self.slots, values)
        return self.treedef.unflatten(values)

    def _describe_mismatch(self, tree: PyTree, name: str) -> str:
        own = {spell(p): x for p, x in zip(self.paths, self.values, strict=True)}
        paths_and_leaves = tree_flatten_with_path(tree, is_leaf=is_absent)[0]
        theirs = {spell(path): leaf for path, leaf in paths_and_leaves}
        where = "containers differ (with Flax NNX, pass both through `nnx.as_pure`)"
        for leaves, others, whose in ((theirs, own, name), (own, theirs, self.name)):
            for path in [path for path in leaves if path not in others][:1]:
                where = f"leaf {path} ({describe(leaves[path])}) is only in {whose}"
        return (
            f"{self.caller}: {name} and {self.name} must have the same structure, but "
            f"{where}.\n  {self.name}: {self.treedef}\n  {name}: "
            f"{jax.tree.structure(tree)}"
        )


def _open(slot: Any, content: Any) -> Any:
    """Return the content of a slot, without boxes like the one in `slot`."""
    if not is_box(slot) or is_absent(content):
        return content
    # Not by `is_box`: what a box holds may be absent.
    kind = type(slot)
    return jax.tree.map(content_of, content, is_leaf=lambda x: type(x) is kind)


def _close(slot: Any, value: Any) -> Any:
    """Return a value in a box like that in `slot`, or in several."""
    if not is_box(slot) or isinstance(value, optax.MaskedNode):
        return value
    if value is None or not is_array(value) and all_leaves([value]):
        return put(slot, value)
    return jax.tree.map(lambda x: put_resized(slot, x, lambda *_: False), value)
