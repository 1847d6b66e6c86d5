"""How the arrays of a leaf lie on many devices, where that is known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from optax_mp._jax._arrays import sharding_in_type
from optax_mp._jax._sharding import axis_names
from optax_mp._tree import spread_prefix
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._program import Value
from optax_mp.leafwise._tails import ElementwiseTail, axis_of_groups

Shardings = Mapping[Value, NamedSharding]


@dataclass(frozen=True)
class Layout:
    """How the arrays of a tail are sharded.

    Attributes:
        tail: the tail.
        sharding: of arrays of elements. Scales are sharded along the same axes. None if
            it is not known.
        axis: the one that is put behind all others: the last, or that of the blocks.
    """

    tail: ElementwiseTail
    sharding: NamedSharding | None
    axis: int

    @classmethod
    def find(
        cls,
        tail: ElementwiseTail,
        args: Sequence[Any],
        shardings: Shardings,
        *,
        turns: bool = False,
    ) -> "Layout":
        """Return the layout of the arrays of a tail.

        Args:
            tail: the tail.
            args: the values of what it reads.
            shardings: where they are known.
            turns: whether to put the axis of the blocks last.
        """
        # From `param_shardings`, or the program, or types. All arrays of a leaf are
        # sharded alike, and scales like the elements. No block may lie on two devices.
        elements = [value for value in tail.reads if value.aval.shape == tail.shape]
        known = [shardings[value] for value in elements if value in shardings]
        in_types = [sharding_in_type(x) for x in args if jnp.ndim(x) == len(tail.shape)]
        candidates = [x for x in known + in_types if x is not None and x.mesh.size > 1]
        # An equation may read a sharded array and one that is not.
        axes = range(len(tail.shape))
        specs = {tuple(axis_names(x.spec, i) for i in axes) for x in candidates}
        is_known = len(specs) == 1 and _divides(candidates[0], tail)
        axis = tail.axis if turns else len(tail.shape) - 1
        return cls(tail, candidates[0] if is_known else None, axis)

    @property
    def part(self) -> Part:
        """The part of the arrays that each device holds; all if that is not known."""
        shape, tail = self.tail.shape, self.tail
        own = shape if self.sharding is None else self.sharding.shard_shape(shape)
        own = self._turn(own)
        origin = (0,) * len(shape)
        return Part(shape, own, tail.block_size, origin, self.axis, tail.group_size)

    def _turn(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        return *sizes[: self.axis], *sizes[self.axis + 1 :], sizes[self.axis]

    def run(
        self,
        run_part: Callable[[Part, Sequence[Any]], Sequence[Any]],
        args: Sequence[Any],
    ) -> list[Any]:
        """Return the outputs of the tail, computed on each device for its own part."""

        def run_turned(part: Part, args: Sequence[Any]) -> Sequence[Any]:
            moved = [jnp.moveaxis(x, self.axis, -1) if jnp.ndim(x) else x for x in args]
            return [jnp.moveaxis(x, -1, self.axis) for x in run_part(part, moved)]

        if self.sharding is None:
            return list(run_turned(self.part, args))
        spec, part = self.sharding.spec, self.part
        names = self._turn([axis_names(spec, i) for i in range(len(part.shape))])

        # Random numbers are a hash of the place in the whole array: a shard must know
        # where it begins.
        def run_shard(*args: Any) -> tuple[Any, ...]:
            origin = tuple(
                jax.lax.axis_index(name) * size if name else jnp.int32(0)
                for name, size in zip(names, part.shape, strict=True)
            )
            return tuple(run_turned(replace(part, origin=origin), args))

        def spec_of(x: Any) -> PartitionSpec:
            return spec if jnp.ndim(x) else PartitionSpec()

        run_sharded = jax.shard_map(
            run_shard,
            mesh=self.sharding.mesh,
            in_specs=tuple(map(spec_of, args)),
            out_specs=tuple(spec_of(value.aval) for value in self.tail.outputs),
            check_vma=False,
        )
        return list(run_sharded(*args))


def spread_shardings(
    params: Any, shardings: Any, caller: str
) -> list[NamedSharding | None]:
    """Return the sharding of each param, None where a mesh is not known.

    Args:
        params: the params.
        shardings: a tree of shardings like these, a prefix of one, or None.
        caller: the public function that the user called, for error messages.
    """
    if shardings is None:
        return []
    leaves = spread_prefix(params, shardings, f"{caller}: `param_shardings`")
    for leaf in leaves:
        if not isinstance(leaf, Sharding):
            raise TypeError(
                f"{caller}: expected `param_shardings` to hold shardings, such as a "
                f"`jax.sharding.NamedSharding`, got {leaf!r}; pass "
                "`jax.tree.map(lambda p: p.sharding, params)`."
            )
    return [leaf if isinstance(leaf, NamedSharding) else None for leaf in leaves]


def _divides(sharding: NamedSharding, tail: ElementwiseTail) -> bool:
    """Return whether shards are of one shape, and none begins within a block."""
    # The other axes may be cut anywhere: an element shares a scale or a shift with
    # neighbours along two alone.
    try:
        own = sharding.shard_shape(tail.shape)
    except ValueError:
        return False
    along = axis_of_groups(len(own), tail.axis)
    sizes = {tail.axis: tail.block_size} | dict.fromkeys(along, tail.group_size)
    return all(
        own[x] == tail.shape[x] or own[x] % size == 0 for x, size in sizes.items()
    )
