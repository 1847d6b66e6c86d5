"""gradient_range_report: which formats do the magnitudes of a tree fit into?"""

import math
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass, tree_leaves_with_path
from jax.typing import ArrayLike, DTypeLike

from optax_mp import _table
from optax_mp.core import _dtypes
from optax_mp.core.jax_api._arrays import is_traced
from optax_mp.core.scaling._rule import check_settings
from optax_mp.core.trees import _tree
from optax_mp.core.trees._boxes import plain
from optax_mp.reports import _leaf_counts

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
    name = _dtypes.floating_dtype(dtype, "GradientRangeReport: `dtype`").name
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
    return _leaf_counts.count_bins(
        (magnitudes >> _EXPONENT_BIT) + is_nonzero, _BIN_COUNT
    )


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
class GradientRangeReport(_leaf_counts.LeafCounts):
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

        All values of an octave count as its middle.

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
            underflow=_leaf_counts.share(finite[is_zero], counts),
            subnormal=_leaf_counts.share(finite[~is_zero & (middles < normal)], counts),
            overflow=_leaf_counts.share(finite[middles > largest], counts),
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
        ax, counts = _table.axes_or_new(ax), self._counts_of(path)
        occupied = _EXPONENTS[counts[1:-1] > 0]
        edges = np.arange(occupied.min(initial=-24), occupied.max(initial=16) + 2)
        ax.hist(_EXPONENTS, edges, weights=100 * counts[1:-1] / max(counts.sum(), 1))
        for limit in (-24, 16):
            ax.axvline(limit, color="gray", linestyle="--")
        ax.set(xlabel="exponent of the magnitude, to base 2", ylabel="% of values")
        return ax

    def _parts(self) -> list[str | _table.Table]:
        def losses_in(name: str, path: str | None) -> str:
            pairs = zip(astuple(self.in_format(name, path)), "uso", strict=True)
            return (
                " ".join(f"{_table.percent(x)}{letter}" for x, letter in pairs if x)
                or "0"
            )

        titles = ("values", *(name.removeprefix("float8_") for name in FORMATS))
        table = self._table(titles, lambda path: [losses_in(x, path) for x in FORMATS])
        lines: list[str | _table.Table] = [_LEGEND, table]
        if math.isnan(self.best_loss_scale()):
            return [*lines, "no loss scale fits: there is no finite value other than 0"]
        if self.not_finite():
            lines.append("of the finite values (use gradients that did not overflow):")
        for name in FORMATS[1:]:
            scale = self.best_loss_scale(name)
            fits = [self.in_format(name, loss_scale=x) for x in (1.0, scale)]
            losses = [
                f"{_table.percent(x.underflow)}/{_table.percent(x.overflow)}%"
                for x in fits
            ]
            lines.append(
                f"{name}: best loss scale 2**{round(math.log2(scale))}: under/overflow "
                f"{' -> '.join(losses)}"
            )
        return lines


register_dataclass(GradientRangeReport, ["counts"], ["paths"])


def gradient_range_report(
    grads: _tree.PyTree, *, loss_scale: ArrayLike | None = None
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
        _tree.spell(path): (leaf,)
        for path, leaf in tree_leaves_with_path(plain(grads))
        if _dtypes.is_floating(leaf)
    }
    count = partial(_count_octaves, loss_scale=loss_scale)
    where = "gradient_range_report: `grads`"
    return GradientRangeReport(*_leaf_counts.count_leaves(where, grads, leaves, count))
