"""The leaves of a tree with their paths, and other trees matched to it leaf by leaf.

If the tree has boxes of a framework, a leaf is matched with its box.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from numbers import Number
from typing import Any

import jax
import optax
from jax.tree_util import DictKey, SequenceKey, all_leaves, tree_flatten_with_path

from optax_mp.core import _dtypes
from optax_mp.core.jax_api._arrays import describe, is_array
from optax_mp.core.trees import _boxes, _tree

# The types of nodes that stand for nothing, and the keys of dicts and sequences.
ABSENT = (type(None), optax.MaskedNode)
_PLAIN_KEYS = frozenset((DictKey, SequenceKey))


def is_absent(leaf: Any) -> bool:
    """Return whether `leaf` stands for nothing: None or `optax.MaskedNode()`."""
    return isinstance(leaf, ABSENT)


def contents_of(tree: _tree.PyTree, like: _tree.PyTree) -> list[Any] | None:
    """Return the subtree of `tree` for each leaf or box of another tree.

    An absent node may stand for a whole branch. If the structures differ, return None.
    """
    if _boxes.is_box(like) or all_leaves([like]):
        return [tree]
    if is_absent(tree):
        return [tree] * len(_boxes.flatten_slots(like)[0])
    own, theirs = _boxes.one_level(like), _boxes.one_level(tree)
    # Other parts of the structure are not compared: metadata of boxes may differ.
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
        values: the leaves. A Python float is an array `[]`, as under `jit`.
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
    def of(cls, tree: _tree.PyTree, *, caller: str, name: str = "`params`") -> "Leaves":
        """Flatten `tree`."""
        paths_and_leaves, treedef = tree_flatten_with_path(tree)
        paths = [path for path, _ in paths_and_leaves]
        values = [_dtypes.as_array(leaf) for _, leaf in paths_and_leaves]
        # Leaves that only dicts and sequences hold are in no box.
        if _PLAIN_KEYS.issuperset([type(path[-1]) for path in paths if path]):
            return cls(caller, name, paths, values, values, treedef)
        return cls(caller, name, paths, values, *_boxes.flatten_slots(tree))

    @property
    def has_boxes(self) -> bool:
        """Whether some leaf may be in a box."""
        return self.slots is not self.values

    def match(self, tree: _tree.PyTree, name: str) -> list[Any]:
        """Return what `tree` has at each leaf: a leaf, None or a `MaskedNode`."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef == self.treedef:
            return leaves
        matched = self._contents(tree, name)
        for path, leaf in zip(self.paths, matched, strict=True):
            if not (is_absent(leaf) or all_leaves([leaf])):
                raise ValueError(
                    f"{self.caller}: expected {name} at {_tree.spell(path)} to be a "
                    f"leaf, got a {type(leaf).__name__}; with Flax NNX, use "
                    "`nnx.as_pure`."
                )
        return matched

    def match_arrays(self, tree: _tree.PyTree, name: str) -> list[Any]:
        """Return what `tree` has at each leaf; raise unless shape and dtype agree.

        Two floating leaves may differ in dtype. A plain number counts as `[]`.
        """
        matched = self.match(tree, name)
        for path, want, leaf in zip(self.paths, self.values, matched, strict=True):
            if not is_array(want) or isinstance(leaf, Number) and not want.shape:
                continue
            same = getattr(leaf, "shape", None) == want.shape
            if not (_dtypes.is_floating(leaf) and _dtypes.is_floating(want)):
                same &= getattr(leaf, "dtype", None) == want.dtype
            if not same:
                raise ValueError(
                    f"{self.caller}: expected {name} at {_tree.spell(path)} to be "
                    f"{describe(want)}, as in {self.name}, got {describe(leaf)}."
                )
        return matched

    def unflatten(self, values: Iterable[Any]) -> _tree.PyTree:
        """Return a tree of this structure; a `MaskedNode` stands without a box."""
        if self.has_boxes:
            values = map(_in_box, self.slots, values)
        return self.treedef.unflatten(values)

    def _contents(self, tree: _tree.PyTree, name: str) -> list[Any]:
        """Return the subtree of `tree` in each slot, without its box."""
        try:
            contents: list[Any] | None = self.treedef.flatten_up_to(tree)
        except (ValueError, TypeError, KeyError):
            # `optax.masked` may hide a whole branch by one `MaskedNode`.
            contents = contents_of(tree, self.treedef.unflatten(self.slots))
        if contents is not None and not self.has_boxes:
            return contents
        pairs = zip(self.slots, contents or [], strict=False)
        lacks_box = (
            _boxes.is_box(a) and is_array(x) and not _boxes.is_box(x) for a, x in pairs
        )
        if contents is None or any(lacks_box):
            raise ValueError(self._describe_mismatch(tree, name))
        return list(map(_without_box, self.slots, contents))

    def _describe_mismatch(self, tree: _tree.PyTree, name: str) -> str:
        own = {_tree.spell(p): x for p, x in zip(self.paths, self.values, strict=True)}
        paths_and_leaves = tree_flatten_with_path(tree, is_leaf=is_absent)[0]
        theirs = {_tree.spell(path): leaf for path, leaf in paths_and_leaves}
        where = "containers differ (with Flax NNX, pass both through `nnx.as_pure`)"
        for leaves, others, whose in ((theirs, own, name), (own, theirs, self.name)):
            for path in [path for path in leaves if path not in others][:1]:
                where = f"leaf {path} ({describe(leaves[path])}) is only in {whose}"
        return (
            f"{self.caller}: {name} and {self.name} must have the same structure, but "
            f"{where}.\n  {self.name}: {self.treedef}\n  {name}: "
            f"{jax.tree.structure(tree)}"
        )


def _without_box(slot: Any, content: Any) -> Any:
    """Return the content of a slot, without a box like the one in `slot`."""
    # Not by `is_box`: what a box holds may be absent.
    if _boxes.is_box(slot) and type(content) is type(slot):
        return _boxes.content_of(content)
    return content


def _in_box(slot: Any, value: Any) -> Any:
    """Return a value in a box like that in `slot`, if it has one."""
    return (
        value
        if isinstance(value, optax.MaskedNode)
        else _boxes.in_box_like(slot, value)
    )
