"""Reports that count the values of each leaf by bins, and add up."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_mp._jax._arrays import has_explicit_axes, is_traced
from optax_mp._tree import describe

_MOST_VALUES = 2**32 - 1  # A uint32 can count no more.


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, eq=False)
class LeafCounts:
    """How many values of each leaf lie in each bin, to be registered as a pytree.

    Attributes:
        counts: uint32, shape (leaves, bins), or stacks of such arrays.
        paths: the path of each leaf, as `jax.tree_util.keystr` writes it.
    """

    counts: jax.Array
    paths: tuple[str, ...]

    def _counts_of(self, path: str | None) -> np.ndarray:
        """Return the counts of a leaf, or of all, summed over stacked reports."""
        name = type(self).__name__
        if is_traced(self.counts):
            raise TypeError(
                f"{name}: `counts` is traced ({describe(self.counts)}), expected "
                "concrete values; return the report from the jitted function and read "
                "it outside."
            )
        counts = np.asarray(self.counts).astype(np.int64)
        counts = counts.reshape(-1, *counts.shape[-2:]).sum(0)
        if path is None:
            return counts.sum(0)
        if path not in self.paths:
            raise ValueError(
                f"{name}: `path` is {path!r}, expected one of `paths`: "
                f"{', '.join(self.paths)}."
            )
        return counts[self.paths.index(path)]


def check_size(path: str, leaf: Any, caller: str) -> None:
    """Raise if a leaf has more values than can be counted."""
    if leaf.size > _MOST_VALUES:
        raise ValueError(
            f"{caller}: leaf {path} is {describe(leaf)}, expected at most "
            f"{_MOST_VALUES} values; pass slices of it."
        )


def count_bins(bins: jax.Array, bin_count: int) -> jax.Array:
    """Return how often each of the integers below `bin_count` is in `bins`."""
    # On an explicit mesh JAX must be told that all devices get the sum.
    mesh = _explicit_mesh(bins)
    sharding: dict[str, Any] = (
        {} if mesh is None else {"out_sharding": NamedSharding(mesh, P())}
    )
    # Without bounds checks, which take longer to compile than the rest.
    empty = jnp.zeros(bin_count, jnp.uint32)
    return empty.at[bins].add(1, mode="promise_in_bounds", **sharding)


def _explicit_mesh(leaf: jax.Array) -> Any:
    """Return the mesh of an array whose type says how it is sharded, or None."""
    mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
    return mesh if has_explicit_axes(mesh) else None


def share(part: Any, counts: np.ndarray) -> float:
    """Return a part of all counts as a share; 0 of nothing."""
    return float(part) / max(int(counts.sum()), 1)
