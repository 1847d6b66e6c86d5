"""Boxes for scales, like the boxes of their codes, although the shapes differ."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from optax_mp.core.trees import _boxes

# Decides whether an axis of a new length keeps its name, if that means a mesh axis.
_Divides = Callable[[Any, int], bool]


def box_scales(box: Any, scales: jax.Array) -> Any:
    """Return scales in a box like `box`; without one if it does not take their shape.

    A box may name its axes, for example by mesh axes. A name is kept for an axis of
    unchanged length, and for a shorter axis if its length divides among the devices of
    its name. (Uneven shards are an error.)

    Args:
        box: a box around an array, or an array.
        scales: an array with as many axes as the codes.
    """
    old = _boxes.unbox(box)
    if not _boxes.is_box(box) or scales.shape == old.shape:
        return _boxes.in_box_like(box, scales)
    divides = _divides_names(box)

    def fit(entries: Any) -> Any:
        """Return entries for the axes of scales, if `entries` are about axes."""
        if not _is_about_axes(entries, old.ndim):
            return entries
        lengths = zip(entries, old.shape, scales.shape, strict=True)
        kept = [
            entry if n == m or entry is None or divides(entry, m) else None
            for entry, n, m in lengths
        ]
        if kept == list(entries):
            return entries
        return tuple(kept) if isinstance(entries, tuple) else type(entries)(*kept)

    try:
        return _resized(box, old, scales, fit)
    except (ValueError, TypeError, AssertionError):
        return scales


def _resized(box: Any, old: Any, scales: Any, fit: Callable[[Any], Any]) -> Any:
    if hasattr(box, "get_metadata"):  # a variable of NNX
        metadata = {name: fit(x) for name, x in box.get_metadata().items()}
        # Not by `set_metadata`, which renames entries of older versions of Flax.
        return type(box).from_metadata(scales, metadata)
    if dataclasses.is_dataclass(box) and not isinstance(box, type):
        before = {x.name: getattr(box, x.name) for x in dataclasses.fields(box)}
        if any(_has_sizes(x, old.ndim) for x in before.values()):
            return scales
        after = {name: scales if x is old else fit(x) for name, x in before.items()}
        changes = {name: x for name, x in after.items() if x is not before[name]}
        if len(changes) > 1:
            return dataclasses.replace(box, **changes)
    # Not by the class itself: the attributes of `equinox.nn.Embedding` are not fields.
    return _boxes.in_box_like(box, scales)


def _is_about_axes(entries: Any, ndim: int) -> bool:
    """Return whether metadata has an entry for each axis, such as a name."""
    is_spec = isinstance(entries, tuple | jax.sharding.PartitionSpec)
    return is_spec and 0 < ndim == len(entries) and all(map(_is_name, entries))


def _has_sizes(entries: Any, ndim: int) -> bool:
    """Return whether metadata has something else for each axis, as haliax's sizes."""
    is_of_axes = isinstance(entries, tuple) and 0 < ndim == len(entries)
    return is_of_axes and not all(map(_is_name, entries))


def _is_name(entry: Any) -> bool:
    # Several mesh axes are a tuple of names.
    return entry is None or isinstance(entry, str | tuple)


def _divides_names(box: Any) -> _Divides:
    """Return a test of whether an axis of a box divides over the devices of its name.

    If no mesh is known, or a name is not a mesh axis but one that rules translate, the
    axis must divide over all devices.
    """
    mesh = getattr(box, "mesh", None) or jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)

    def divides(names: Any, length: int) -> bool:
        names = (names,) if isinstance(names, str) else names
        if not sizes:  # not before, because it starts the backend
            return length % jax.device_count() == 0
        axes = names if all(name in sizes for name in names) else sizes
        return length % math.prod(sizes[name] for name in axes) == 0

    return divides
