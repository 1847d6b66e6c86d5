"""Reports that count the values of each leaf by bins: pytrees that can be added."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._table import Report, Table, percent
from optax_mp.core.jax_api import _arrays

_MOST_VALUES = 2**32 - 1  # A uint32 can count no more.


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, eq=False)
class LeafCounts(Report):
    """How many values of each leaf lie in each bin, to be registered as a pytree.

    The first bin counts zeros, the last what is infinite or NaN.

    Attributes:
        counts: uint32, shape (leaves, bins), or stacks of such arrays.
        paths: the path of each leaf, as `jax.tree_util.keystr` writes it.
    """

    counts: jax.Array
    paths: tuple[str, ...]

    def zeros(self, path: str | None = None) -> float:
        """Return the share of values that are exactly 0, of a leaf or of all."""
        return self._share_of(path, 0)

    def not_finite(self, path: str | None = None) -> float:
        """Return the share of values that are infinite or NaN, of a leaf or of all."""
        return self._share_of(path, -1)

    def _share_of(self, path: str | None, place: int) -> float:
        counts = self._counts_of(path)
        return share(counts[place], counts)

    def _counts_of(self, path: str | None) -> np.ndarray:
        """Return the counts of a leaf, or of all, summed over stacked reports."""
        name = type(self).__name__
        if _arrays.is_traced(self.counts):
            raise TypeError(
                f"{name}: expected concrete `counts`, got a traced "
                f"{_arrays.describe(self.counts)}; return it from `jit`, and read it "
                "outside."
            )
        counts = np.asarray(self.counts).astype(np.int64)
        counts = counts.reshape(-1, *counts.shape[-2:]).sum(0)
        if path is None:
            return counts.sum(0)
        if path not in self.paths:
            raise ValueError(
                f"{name}: expected `path` to be one of `paths` "
                f"({', '.join(self.paths)}), got {path!r}."
            )
        return counts[self.paths.index(path)]

    def _table(
        self, titles: Sequence[str], cells: Callable[[str | None], Sequence[str]]
    ) -> Table:
        """Return a table of the leaves: what all reports count, and `cells` of each."""
        rows = [("", titles[0], "inf, NaN", "0", *titles[1:])]
        places = [(path, path) for path in self.paths]
        for title, path in places + [("all", None)] * (len(places) > 1):
            shares = percent(self.not_finite(path)), percent(self.zeros(path))
            count = f"{self._counts_of(path).sum():,}"
            rows.append((title, count, *shares, *cells(path)))
        return Table(rows)


def count_leaves(
    argument: str, tree: Any, leaves: dict[str, Any], count: Callable[..., jax.Array]
) -> tuple[jax.Array, tuple[str, ...]]:
    """Return the counts of each leaf by `count`, and the paths.

    Args:
        argument: what to call the tree in errors.
        tree: the tree of the leaves, to describe it in errors.
        leaves: by path, the arguments of `count`: a leaf, and others that belong to it.
        count: returns the counts of a leaf.
    """
    caller, _, name = argument.partition(": ")
    if not leaves:
        raise ValueError(
            f"{caller}: expected {name} to be a tree with floating arrays to count, "
            f"got a {type(tree).__name__} without any."
        )
    for path, (leaf, *_) in leaves.items():
        if leaf.size > _MOST_VALUES:
            raise ValueError(
                f"{caller}: expected leaf {path} of {name} to have at most "
                f"{_MOST_VALUES} values, got {_arrays.describe(leaf)}; pass slices of "
                "it."
            )
    # A NumPy float64 can overflow in float32, and then counts as infinite.
    with np.errstate(over="ignore"):
        arrays = [map(jnp.asarray, leaf) for leaf in leaves.values()]
        return jnp.stack([count(*leaf) for leaf in arrays]), tuple(leaves)


def count_bins(bins: jax.Array, bin_count: int) -> jax.Array:
    """Return how often each of the integers below `bin_count` is in `bins`."""
    # On an explicit mesh JAX must be told that all devices get the sum.
    mesh, sharding = _arrays.mesh_in_type(bins), {}
    if mesh.explicit_axes:
        sharding["out_sharding"] = NamedSharding(mesh, PartitionSpec())
    # Without bounds checks, which take longer to compile than the rest.
    empty = jnp.zeros(bin_count, jnp.uint32)
    return empty.at[bins].add(jnp.uint32(1), mode="promise_in_bounds", **sharding)


def share(part: Any, counts: np.ndarray) -> float:
    """Return a part of all counts as a share; 0 if there are no counts."""
    return float(part.sum()) / max(int(counts.sum()), 1)
