"""How the arrays of a leaf lie on many devices, where that is known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from optax_mp._jax._arrays import sharding_in_type
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._program import Program, Value

Shardings = Mapping[Value, NamedSharding]


@dataclass(frozen=True)
class Layout:
    """How the arrays of a leaf are sharded.

    Attributes:
        sharding: of arrays of elements. Scales are sharded along the same axes.
        whole: the shape of arrays of elements.
    """

    sharding: NamedSharding
    whole: tuple[int, ...]

    @classmethod
    def find(
        cls, end: End, args: Sequence[Any], shardings: Shardings
    ) -> "Layout | None":
        """Return the layout of the arrays of an end, or None if it is not known.

        Args:
            end: the end.
            args: the values of what it reads.
            shardings: of those of these for which they are known.
        """
        # From `param_shardings`, or from types. All arrays of a leaf are sharded alike,
        # and scales like the elements. No block may lie on two devices.
        candidates = [shardings[value] for value in end.reads if value in shardings]
        in_types = [sharding_in_type(x) for x in args if jnp.ndim(x) == len(end.shape)]
        candidates += in_types
        candidates = [x for x in candidates if x is not None and x.mesh.size > 1]
        # An equation may read a sharded array and one that is not.
        if len({x.spec for x in in_types if x is not None}) > 1:
            return None
        if not candidates or not _divides(candidates[0], end):
            return None
        return cls(candidates[0], end.shape)

    def run(
        self,
        run_part: Callable[[Part, Sequence[Any]], Sequence[Any]],
        program: Program,
        end: End,
        args: Sequence[Any],
    ) -> list[Any]:
        """Return the outputs of an end, computed on each device for its own part."""

        # Random numbers are a hash of the place in the whole array: a shard must know
        # where it begins.
        def run_shard(*args: Any) -> tuple[Any, ...]:
            origin = tuple(
                jax.lax.axis_index(names) * size if names else jnp.int32(0)
                for names, size in zip(self._names(), self.shape, strict=True)
            )
            return tuple(run_part(self.part(end, origin), args))

        outputs = [program.outputs[i] for i in end.outputs]
        run_sharded = jax.shard_map(
            run_shard,
            mesh=self.sharding.mesh,
            in_specs=tuple(self._spec(value.aval.shape) for value in end.reads),
            out_specs=tuple(self._spec(value.aval.shape) for value in outputs),
            check_vma=False,
        )
        return list(run_sharded(*args))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what each device holds."""
        return self.sharding.shard_shape(self.whole)

    def part(self, end: End, origin: tuple[Any, ...] = ()) -> Part:
        """Return the part of a device that begins at a place of the whole arrays."""
        size = end.block_size or 1
        return Part(self.whole, self.shape, size, origin)

    def _names(self) -> list[Any]:
        spec = self.sharding.spec
        return [*spec, *[None] * (len(self.whole) - len(spec))]

    def _spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        return self.sharding.spec if shape else PartitionSpec()


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


def spread_prefix(params: Any, prefix: Any, name: str) -> list[Any]:
    """Return for each param the leaf that stands for it in a prefix of their tree."""

    def is_leaf(x: Any) -> bool:
        return x is None

    spread: list[Any] = []
    try:
        jax.tree.map(
            lambda x, part: spread.extend([x] * len(jax.tree.leaves(part))),
            prefix,
            params,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        raise ValueError(
            f"{name} has the structure {jax.tree.structure(prefix, is_leaf=is_leaf)}, "
            f"expected that of the params, which is {jax.tree.structure(params)}, or a "
            "prefix of it; pass `jax.tree.map(lambda p: p.sharding, params)`."
        ) from error
    return spread


def _divides(sharding: NamedSharding, end: End) -> bool:
    """Return whether shards are of one shape, and none begins within a block."""
    # The other axes may be cut anywhere: an element shares a scale with neighbours
    # along the last axis alone.
    try:
        width = sharding.shard_shape(end.shape)[-1]
    except ValueError:
        return False
    return width == end.shape[-1] or width % (end.block_size or 1) == 0
