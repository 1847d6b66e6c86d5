"""Reports that count the values of each leaf by bins, add up, and print as a table.

`gradient_range_report` counts magnitudes: which formats do the values of a tree fit
into? `update_report` counts updates that are too small to move their params.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass, tree_leaves_with_path
from jax.typing import ArrayLike, DTypeLike

from optax_mp._dtypes import at_least_float32, floating_dtype, round_to
from optax_mp._jax._arrays import is_traced, mesh_in_type
from optax_mp._table import Report, Table, axes_or_new, percent
from optax_mp.scaling._rule import check_settings
from optax_mp.trees._boxes import plain
from optax_mp.trees._leaves import Leaves
from optax_mp.trees._tree import PyTree, describe, is_floating, spell

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
        if is_traced(self.counts):
            raise TypeError(
                f"{name}: expected concrete `counts`, got a traced "
                f"{describe(self.counts)}; return it from `jit`, and read it outside."
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
        tree: that the leaves are of.
        leaves: by path, what `count` takes: a leaf, and others that belong to it.
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
                f"{_MOST_VALUES} values, got {describe(leaf)}; pass slices of it."
            )
    # A NumPy float64 can overflow in float32, and then counts as infinite.
    with np.errstate(over="ignore"):
        arrays = [map(jnp.asarray, leaf) for leaf in leaves.values()]
        return jnp.stack([count(*leaf) for leaf in arrays]), tuple(leaves)


def count_bins(bins: jax.Array, bin_count: int) -> jax.Array:
    """Return how often each of the integers below `bin_count` is in `bins`."""
    # On an explicit mesh JAX must be told that all devices get the sum.
    mesh, sharding = mesh_in_type(bins), {}
    if mesh.explicit_axes:
        sharding["out_sharding"] = NamedSharding(mesh, PartitionSpec())
    # Without bounds checks, which take longer to compile than the rest.
    empty = jnp.zeros(bin_count, jnp.uint32)
    return empty.at[bins].add(jnp.uint32(1), mode="promise_in_bounds", **sharding)


def share(part: Any, counts: np.ndarray) -> float:
    """Return a part of all counts as a share; 0 of nothing."""
    return float(part.sum()) / max(int(counts.sum()), 1)


FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
# The exponent of a float32 begins at this bit.
_EXPONENT_BIT = 23
# The exponent of each octave. The first octave holds float32's subnormals.
_EXPONENTS = np.arange(-127, 128)
_OCTAVES = 2.0**_EXPONENTS
# Zero, the octaves, and infinity with NaN.
_BIN_COUNT = len(_OCTAVES) + 2
_LEGEND = "% of values; those that underflow (u), become subnormal (s), overflow (o)"
# How much larger values may become under the scale of `best_loss_scale`.
_HEADROOM = 4.0


def _limits_of(dtype: DTypeLike) -> list[float]:
    """Return the smallest, the smallest normal and the largest number of a format."""
    name = floating_dtype(dtype, "GradientRangeReport: `dtype`").name
    if name not in FORMATS:
        raise ValueError(
            f"GradientRangeReport: expected `dtype` to be one of {', '.join(FORMATS)}, "
            f"got {name}."
        )
    info = jnp.finfo(name)
    return [float(x) for x in (info.smallest_subnormal, info.tiny, info.max)]


@jax.jit
def _count_octaves(leaf: jax.Array, loss_scale: jax.Array | None = None) -> jax.Array:
    """Return how many values of an array lie in each bin."""
    values = leaf.astype(jnp.float32)
    if loss_scale is not None:
        values = values / jnp.asarray(loss_scale).astype(jnp.float32)
    # By its bits, because a comparison may take a subnormal number for 0.
    magnitudes = lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    is_nonzero = (magnitudes > 0).astype(jnp.uint32)
    return count_bins((magnitudes >> _EXPONENT_BIT) + is_nonzero, _BIN_COUNT)


@dataclass(frozen=True)
class FormatRange:
    """Shares of values that overflow, underflow and the like in a format.

    Attributes:
        underflow: the share that is not 0 and becomes 0.
        subnormal: the share that becomes a subnormal number, which has fewer bits.
        overflow: the share that is finite and becomes infinite (in float8_e4m3fn, NaN).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> report = optax_mp.gradient_range_report(jnp.array([1e-9, 1e-6, 1.0, 1e6]))
        >>> report.in_format("float16")
        FormatRange(underflow=0.25, subnormal=0.25, overflow=0.25)
    """

    underflow: float
    subnormal: float
    overflow: float


@dataclass(frozen=True, eq=False)
class GradientRangeReport(LeafCounts):
    """Histograms of the magnitudes in each leaf. Printed, it is a table in percent.

    The report is a pytree of one array: make it under `jit`, carry it through loops,
    return it. Reports of the same tree can be added, by `jax.tree.map(jnp.add, a, b)`
    or `jax.lax.psum`, as long as no bin reaches 2^32. Those that a `scan` stacks are
    read as their sum. The methods read the values, so call them outside `jit`.

    Attributes:
        counts: uint32, shape (leaves, bins): zeros, octaves of magnitude from 2^-127 on
            (the first holds float32's subnormal numbers), and infinity with NaN.
        paths: the path of each leaf, as `jax.tree_util.keystr` writes it.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> grads = {"w": jnp.array([0.0, 2e-8, 1e-3, 3e-2]), "b": jnp.full(4, 3e-6)}
        >>> report = jax.jit(optax_mp.gradient_range_report)(grads)
        >>> report.paths, report.zeros("['w']"), report.best_loss_scale("float16")
        (("['b']", "['w']"), 0.25, 262144.0)
    """

    def in_format(
        self, dtype: DTypeLike, path: str | None = None, *, loss_scale: float = 1.0
    ) -> FormatRange:
        """Return what happens to the values when they are rounded to a format.

        It is known to the octave: the middle of an octave decides for all of it.

        Args:
            dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
            path: one of `paths`; by default, all leaves together.
            loss_scale: a factor for the values.
        """
        check_settings("in_format", loss_scale=loss_scale)
        counts, (smallest, normal, largest) = self._counts_of(path), _limits_of(dtype)
        finite, middles = counts[1:-1], loss_scale * 1.5 * _OCTAVES
        is_zero = middles < smallest / 2
        return FormatRange(
            underflow=share(finite[is_zero], counts),
            subnormal=share(finite[~is_zero & (middles < normal)], counts),
            overflow=share(finite[middles > largest], counts),
        )

    def best_loss_scale(self, dtype: DTypeLike = jnp.float16) -> float:
        """Return the largest power of two that leaves the largest value fourfold room.

        The scale is for these values only. Gradients within the backward pass can be
        larger than gradients of the params, and both change during training;
        `dynamic_loss_scale` follows them. Infinite values and NaN are ignored, so use
        gradients that did not overflow. The result is NaN if every finite value is 0.

        Args:
            dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
        """
        octaves = _EXPONENTS[self._counts_of(None)[1:-1] > 0]
        if not octaves.size:
            return math.nan
        room = _limits_of(dtype)[-1] / (_HEADROOM * 2.0 ** (octaves[-1] + 1))
        return 2.0 ** min(math.floor(math.log2(room)), 126)

    def plot(self, ax: Any = None, path: str | None = None) -> Any:
        """Draw the magnitudes as a histogram, with the limits of float16 as lines.

        Args:
            ax: Matplotlib axes; by default, of a new figure.
            path: one of `paths`; by default, all leaves together.

        Returns:
            The axes.
        """
        ax, counts = axes_or_new(ax), self._counts_of(path)
        occupied = _EXPONENTS[counts[1:-1] > 0]
        edges = np.arange(occupied.min(initial=-24), occupied.max(initial=16) + 2)
        ax.hist(_EXPONENTS, edges, weights=100 * counts[1:-1] / max(counts.sum(), 1))
        for limit in (-24, 16):
            ax.axvline(limit, color="gray", linestyle="--")
        ax.set(xlabel="exponent of the magnitude, to base 2", ylabel="% of values")
        return ax

    def _parts(self) -> list[str | Table]:
        def losses_in(name: str, path: str | None) -> str:
            pairs = zip(astuple(self.in_format(name, path)), "uso", strict=True)
            return " ".join(f"{percent(x)}{letter}" for x, letter in pairs if x) or "0"

        titles = ("values", *(name.removeprefix("float8_") for name in FORMATS))
        table = self._table(titles, lambda path: [losses_in(x, path) for x in FORMATS])
        lines: list[str | Table] = [_LEGEND, table]
        if math.isnan(self.best_loss_scale()):
            return [*lines, "no loss scale fits: there is no finite value other than 0"]
        if self.not_finite():
            lines.append("of the finite values (use gradients that did not overflow):")
        for name in FORMATS[1:]:
            scale = self.best_loss_scale(name)
            fits = [self.in_format(name, loss_scale=x) for x in (1.0, scale)]
            losses = [f"{percent(x.underflow)}/{percent(x.overflow)}%" for x in fits]
            lines.append(
                f"{name}: best loss scale 2**{round(math.log2(scale))}: under/overflow "
                f"{' -> '.join(losses)}"
            )
        return lines


register_dataclass(GradientRangeReport, ["counts"], ["paths"])


def gradient_range_report(
    grads: PyTree, *, loss_scale: ArrayLike | None = None
) -> GradientRangeReport:
    """Count the values of each leaf by magnitude: what would low precision lose?

    The report tells which share of each leaf would become 0, subnormal or infinite in
    bfloat16, float16 and two 8-bit formats, and which loss scale would fit, as in the
    histogram of the mixed-precision paper. It takes one pass over the values. Under
    `jit` make it every hundred steps or so, with `jax.lax.cond`. On CPU, counting
    allocates 8 bytes per value: for a large model pass a few leaves.

    Args:
        grads: gradients, or any other tree: weights, moments, activations. Leaves that
            are not real floating arrays are left out. Values are cast to float32.
        loss_scale: the scale of the gradients, such as `loss_scale(opt_state)` for
            gradients of `optax_mp.value_and_grad`. They are divided by it first.

    Returns:
        The report. Print it for a table.

    Raises:
        ValueError: if `grads` has no floating array, or one too large to count, or if
            `loss_scale` is not positive and finite (unchecked if traced).
        TypeError: if `loss_scale` is not a scalar.

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2018, figure 2b.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> @jax.jit
        ... def step(number, w, report):
        ...     grads = jax.grad(lambda w: jnp.mean(jnp.tanh(w) ** 4))(w)
        ...     report = jax.lax.cond(
        ...         number % 100 == 0,
        ...         optax_mp.gradient_range_report,
        ...         lambda _: report,
        ...         grads,
        ...     )
        ...     return w - grads, report
        >>> w = jnp.logspace(-4, 0, 1000)
        >>> report = optax_mp.gradient_range_report(jnp.zeros_like(w))
        >>> for number in range(3):
        ...     w, report = step(number, w, report)
        >>> print(report)
        % of values; those that underflow (u), become subnormal (s), overflow (o)
                          values  inf, NaN  0  bfloat16  float16  e4m3fn      e5m2
        (the whole tree)   1,000         0  0         0  57u 28s    100u  77u 7.9s
        float16: best loss scale 2**23: under/overflow 57/0% -> 0/0%
        float8_e4m3fn: best loss scale 2**16: under/overflow 100/0% -> 55/0%
        float8_e5m2: best loss scale 2**23: under/overflow 77/0% -> 20/0%
    """
    if not (loss_scale is None or is_traced(loss_scale) and not jnp.ndim(loss_scale)):
        check_settings("gradient_range_report", loss_scale=loss_scale)
    leaves = {
        spell(path): (leaf,)
        for path, leaf in tree_leaves_with_path(plain(grads))
        if is_floating(leaf)
    }
    count = partial(_count_octaves, loss_scale=loss_scale)
    where = "gradient_range_report: `grads`"
    return GradientRangeReport(*count_leaves(where, grads, leaves, count))


_BINS = _ZERO, _STALLED, _MOVED, _NOT_FINITE = range(4)


@dataclass(frozen=True, eq=False)
class UpdateReport(LeafCounts):
    """Which elements the updates move. Printed, it is a table in percent.

    The report is a pytree of one array: make it under `jit`, carry it through loops,
    return it. Reports of the same tree can be added, by `jax.tree.map(jnp.add, a, b)`
    or `jax.lax.psum`, as long as no count reaches 2^32. Those that a `scan` stacks are
    read as their sum. The methods read the values, so call them outside `jit`. They
    return shares of all elements, of one leaf or of all leaves together.

    Attributes:
        counts: uint32, shape (leaves, 4): updates that are 0; that do not move their
            param; that move it; updates or params that are infinite or NaN.
        paths: the path of each leaf, as `jax.tree_util.keystr` writes it.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> updates = {"w": jnp.array([0.0, -0.001, -0.01, 0.003])}
        >>> report = optax_mp.update_report(params, updates)
        >>> report.zeros(), report.stalled(), report.moved()
        (0.25, 0.5, 0.25)
    """

    def stalled(self, path: str | None = None) -> float:
        """Return the share of elements that an update other than 0 does not move."""
        return self._share_of(path, _STALLED)

    def moved(self, path: str | None = None) -> float:
        """Return the share of elements that an update moves."""
        return self._share_of(path, _MOVED)

    def _parts(self) -> list[str | Table]:
        def cells(path: str | None) -> list[str]:
            return [percent(self.stalled(path)), percent(self.moved(path))]

        others = self.stalled() + self.moved()
        lost = f"{percent(self.stalled() / (others or 1))}% of the updates other than 0"
        last = f"{lost} are lost: too small to move the param"
        if not others:
            last = "no update is finite and other than 0"
        elif not self.stalled():
            last = "every update other than 0 moves its param"
        titles = ("elements", "stalled", "moved")
        return ["% of elements", self._table(titles, cells), last]


register_dataclass(UpdateReport, ["counts"], ["paths"])


def update_report(
    params: optax.Params, updates: optax.Updates, *, dtype: DTypeLike | None = None
) -> UpdateReport:
    """Count the updates of each leaf that are too small to move its params.

    A bfloat16 weight of 1.0 that receives an update of -0.001 stays 1.0, because this
    is less than half a unit in the last place. The report tells how many elements
    stall like this, as `optax.apply_updates` adds and rounds. Updates that are exactly
    0 are counted apart.

    - Plain 16-bit training: pass the params and the updates of the optimizer. Stalled
      steps are lost.
    - float32 training: add `dtype=jnp.bfloat16` to see what 16-bit params would lose.
    - `mixed_precision`: its updates are differences of rounded params, so each of them
      is 0 or moves its param, and masters keep the rest. To see what the masters save,
      pass the masters before the step, the change of the masters, and the `dtype` of
      the params::

          masters = optax_mp.master_params(opt_state, params)
          # ... the step ...
          after = optax_mp.master_params(opt_state, params)
          change = jax.tree.map(jnp.subtract, after, masters)
          print(optax_mp.update_report(masters, change, dtype=jnp.bfloat16))

    - `Split(8)` and `stochastic_rounding`: an update that is too small for their last
      bit moves it at random, right on average. None is lost.

    It takes one pass over the values. Under `jit` make it every hundred steps or so,
    with `jax.lax.cond`.

    Args:
        params: the params before the step. Leaves that are not real floating arrays
            are left out.
        updates: a tree like the params, as `tx.update` returns it. None and
            `optax.MaskedNode()` are left out.
        dtype: the dtype in which the params are stored; by default each leaf's own.
            Params are rounded to it first.

    Returns:
        The report. Print it for a table.

    Raises:
        ValueError: if the trees do not match, if they hold no floating arrays or one
            too large to count, or if `dtype` is not a floating dtype.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"b": jnp.zeros(8), "w": jnp.linspace(-1.0, 1.0, 1000)}
        >>> tx = optax.adam(1e-3)
        >>> grads = jax.tree.map(jnp.ones_like, params)
        >>> updates, _ = tx.update(grads, tx.init(params), params)
        >>> print(optax_mp.update_report(params, updates, dtype="bfloat16"))
        % of elements
               elements  inf, NaN  0  stalled  moved
        ['b']         8         0  0        0    100
        ['w']     1,000         0  0       50     50
        all       1,008         0  0       50     50
        50% of the updates other than 0 are lost: too small to move the param
    """
    if dtype is not None:
        dtype = floating_dtype(dtype, "update_report: `dtype`")
    params, updates = plain(params), plain(updates)
    leaves = Leaves.of(params, caller="update_report", name="`params`")
    pairs = zip(leaves.values, leaves.match(updates, "`updates`"), strict=True)
    found = {
        spell(path): pair
        for path, pair in zip(leaves.paths, pairs, strict=True)
        if all(map(is_floating, pair))
    }
    for path, (param, update) in found.items():
        if param.shape != update.shape:
            raise ValueError(
                f"update_report: expected the update of {path} to have the shape of "
                f"the param {describe(param)}, got {describe(update)}."
            )
    count, where = partial(_count_moves, dtype=dtype), "update_report: `params`"
    return UpdateReport(*count_leaves(where, params, found, count))


@partial(jax.jit, static_argnames="dtype")
def _count_moves(param: jax.Array, update: jax.Array, dtype: Any = None) -> jax.Array:
    """Return how many elements lie in each bin."""
    dtype = param.dtype if dtype is None else dtype
    wide = jnp.result_type(*map(at_least_float32, (param.dtype, update.dtype, dtype)))
    old, change = round_to(param.astype(wide), dtype), update.astype(wide)
    # Not by casts, which XLA may leave out.
    moves = round_to(old + change, dtype) != old
    bins = jnp.where(change == 0, _ZERO, jnp.where(moves, _MOVED, _STALLED))
    are_finite = jnp.isfinite(param) & jnp.isfinite(update)
    return count_bins(jnp.where(are_finite, bins, _NOT_FINITE), len(_BINS))
