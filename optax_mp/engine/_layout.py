"""Each device's shard of a leaf, where that is known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._jax._arrays import axis_names, sharding_in_type
from optax_mp.engine._program import Value
from optax_mp.engine._tails import ElementwiseTail, axis_of_groups

Shardings = Mapping[Value, NamedSharding]


@dataclass(frozen=True)
class Part:
    """The arrays of a leaf that one device holds: all, or a shard of each.

    Attributes:
        whole: the shape of the arrays of elements, on all devices together.
        shape: of their shards, with the axis of blocks behind all others.
        block_size: how many elements along that axis share a scale.
        origin: the place of the first element in the whole arrays, as in `shape`.
        axis: the place of the last axis in `whole`.
        group_size: how many elements along the axis before it share a shift.
        sharding: of arrays of elements. Scales are sharded along the same axes. None if
            it is not known; the part is all of the arrays then.
    """

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    block_size: int
    origin: tuple[Any, ...]
    axis: int = -1
    group_size: int = 1
    sharding: NamedSharding | None = None

    @classmethod
    def of(
        cls, tail: ElementwiseTail, args: Sequence[Any], shardings: Shardings
    ) -> "Part":
        """Return the part of a tail's arrays that each device has.

        Args:
            tail: the tail.
            args: the values of what it reads.
            shardings: where they are known.
        """
        # From `param_shardings`, or the program, or types. All arrays of a leaf are
        # sharded alike, and scales like the elements. No block may lie on two devices.
        whole = tail.shape
        elements = [value for value in tail.reads if value.aval.shape == whole]
        known = [shardings[value] for value in elements if value in shardings]
        in_types = [sharding_in_type(x) for x in args if jnp.ndim(x) == len(whole)]
        candidates = [x for x in known + in_types if x is not None and x.mesh.size > 1]
        # An equation may read a sharded array and one that is not.
        axes = range(len(whole))
        specs = {tuple(axis_names(x.spec, i) for i in axes) for x in candidates}
        is_known = len(specs) == 1 and _divides(candidates[0], tail)
        sharding = candidates[0] if is_known else None
        own = whole if sharding is None else sharding.shard_shape(whole)
        sizes = tail.block_size, (0,) * len(whole), tail.axis, tail.group_size
        return cls(whole, _put_last(own, tail.axis), *sizes, sharding)

    def place_of(self, axis: int) -> int:
        """Return the place in `shape` of an axis of `whole`."""
        own = self.axis % len(self.whole)
        return len(self.whole) - 1 if axis == own else axis - (axis > own)

    def in_memory(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Return the entries of the axes of `shape`, in the order of `whole`'s axes."""
        *others, last = entries
        return *others[: self.axis], last, *others[self.axis :]

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many rows and columns of elements share an entry of an array.

        Args:
            shape: of the array on all devices: of elements, scales or shifts.
        """
        if shape == self.whole:
            return 1, 1
        is_wide = shape[self.axis :][:1] == self.whole[self.axis :][:1]
        is_shifts = len(shape) > 1 and is_wide
        return (self.group_size, 1) if is_shifts else (1, self.block_size)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the shard of an array on all devices."""
        return shape_in_blocks(self.shape, *self.block_of(shape)) if shape else ()

    def run(
        self, run_part: Callable[["Part", Any], Sequence[Any]], args: Sequence[Any]
    ) -> list[Any]:
        """Return the arrays that a function returns, on each device for its part."""

        def run_moved(part: Part, args: Sequence[Any]) -> list[Any]:
            moved = [jnp.moveaxis(x, self.axis, -1) if jnp.ndim(x) else x for x in args]
            return [jnp.moveaxis(x, -1, self.axis) for x in run_part(part, moved)]

        if self.sharding is None:
            return run_moved(self, args)
        spec = self.sharding.spec
        names = [axis_names(spec, i) for i in range(len(self.shape))]
        names = _put_last(names, self.axis)

        # Random numbers are a hash of the place in the whole array: a shard must know
        # where it begins.
        def run_shard(*args: Any) -> list[Any]:
            origin = tuple(
                jax.lax.axis_index(name) * size if name else jnp.int32(0)
                for name, size in zip(names, self.shape, strict=True)
            )
            return run_moved(replace(self, origin=origin), args)

        return jax.shard_map(
            run_shard,
            mesh=self.sharding.mesh,
            in_specs=tuple(spec if jnp.ndim(x) else PartitionSpec() for x in args),
            out_specs=spec,
            check_vma=False,
        )(*args)


def _put_last(entries: Sequence[Any], axis: int) -> tuple[Any, ...]:
    return *entries[:axis], *entries[axis + 1 :], entries[axis]


def shape_in_blocks(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of an array with an entry for each block of rows and columns."""
    *leading, height, width = 1, *shape
    return (*leading, -(-height // rows), -(-width // columns))[-len(shape) :]


def _divides(sharding: NamedSharding, tail: ElementwiseTail) -> bool:
    """Return whether shards are of one shape, and none begins within a block."""
    # The other axes may be cut anywhere: an element shares a scale or a shift with
    # neighbours only along two.
    try:
        own = sharding.shard_shape(tail.shape)
    except ValueError:
        return False
    along = axis_of_groups(len(own), tail.axis)
    sizes = {tail.axis: tail.block_size} | dict.fromkeys(along, tail.group_size)
    return all(
        own[x] == tail.shape[x] or own[x] % size == 0 for x, size in sizes.items()
    )
