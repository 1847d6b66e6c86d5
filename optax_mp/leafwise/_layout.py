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
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._program import Value

Shardings = Mapping[Value, NamedSharding]


@dataclass(frozen=True)
class Layout:
    """How the arrays of an end are sharded.

    Attributes:
        end: the end.
        sharding: of arrays of elements. Scales are sharded along the same axes. None if
            it is not known.
    """

    end: End
    sharding: NamedSharding | None

    @classmethod
    def find(cls, end: End, args: Sequence[Any], shardings: Shardings) -> "Layout":
        """Return the layout of the arrays of an end.

        Args:
            end: the end.
            args: the values of what it reads.
            shardings: of those of these for which they are known.
        """
        # From `param_shardings`, or the program, or types. All arrays of a leaf are
        # sharded alike, and scales like the elements. No block may lie on two devices.
        elements = [value for value in end.reads if value.aval.shape == end.shape]
        known = [shardings[value] for value in elements if value in shardings]
        in_types = [sharding_in_type(x) for x in args if jnp.ndim(x) == len(end.shape)]
        candidates = [x for x in known + in_types if x is not None and x.mesh.size > 1]
        # An equation may read a sharded array and one that is not.
        axes = range(len(end.shape))
        specs = {tuple(axis_names(x.spec, i) for i in axes) for x in candidates}
        is_known = len(specs) == 1 and _divides(candidates[0], end)
        return cls(end, candidates[0] if is_known else None)

    @property
    def part(self) -> Part:
        """The part of the arrays that each device holds; all if that is not known."""
        shape, sizes = self.end.shape, (self.end.block_size, self.end.group_size)
        own = shape if self.sharding is None else self.sharding.shard_shape(shape)
        return Part(shape, own, *(x or 1 for x in sizes), (0,) * len(shape))

    def run(
        self,
        run_part: Callable[[Part, Sequence[Any]], Sequence[Any]],
        args: Sequence[Any],
    ) -> list[Any]:
        """Return the outputs of the end, computed on each device for its own part."""
        if self.sharding is None:
            return list(run_part(self.part, args))
        spec, part = self.sharding.spec, self.part
        names = [axis_names(spec, axis) for axis in range(len(part.shape))]

        # Random numbers are a hash of the place in the whole array: a shard must know
        # where it begins.
        def run_shard(*args: Any) -> tuple[Any, ...]:
            origin = tuple(
                jax.lax.axis_index(name) * size if name else jnp.int32(0)
                for name, size in zip(names, part.shape, strict=True)
            )
            return tuple(run_part(replace(part, origin=origin), args))

        def spec_of(x: Any) -> PartitionSpec:
            return spec if jnp.ndim(x) else PartitionSpec()

        run_sharded = jax.shard_map(
            run_shard,
            mesh=self.sharding.mesh,
            in_specs=tuple(map(spec_of, args)),
            out_specs=tuple(spec_of(value.aval) for value in self.end.outputs),
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
                f"{caller}: `param_shardings` holds {leaf!r}, expected shardings, "
                "such as a `jax.sharding.NamedSharding`; pass "
                "`jax.tree.map(lambda p: p.sharding, params)`."
            )
    return [leaf if isinstance(leaf, NamedSharding) else None for leaf in leaves]


def _divides(sharding: NamedSharding, end: End) -> bool:
    """Return whether shards are of one shape, and none begins within a block."""
    # The other axes may be cut anywhere: an element shares a scale or a shift with
    # neighbours along the last two alone.
    try:
        own = sharding.shard_shape(end.shape)
    except ValueError:
        return False
    ends = zip(own[::-1], end.shape[::-1], (end.block_size, end.group_size))
    return all(a == b or a % (size or 1) == 0 for a, b, size in ends)
