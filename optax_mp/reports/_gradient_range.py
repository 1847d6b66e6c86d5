"""gradient_range_report: which low-precision formats the values of a tree fit into."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass, tree_leaves_with_path
from jax.typing import ArrayLike, DTypeLike

from optax_mp._dtypes import floating_dtype
from optax_mp._jax._arrays import is_traced
from optax_mp._table import axes_or_new, percent
from optax_mp.reports._leaf_counts import LeafCounts, count_bins, count_leaves, share
from optax_mp.scaling._rule import check_settings
from optax_mp.trees._boxes import plain
from optax_mp.trees._tree import PyTree, is_floating, spell

FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
# The exponent of a float32 begins at this bit.
_EXPONENT_BIT = 23


class _Limits(NamedTuple):
    """The positive float32 numbers, as bit patterns, where a format's rounding changes.

    Rounding is to nearest, and to even halfway between two numbers.

    Attributes:
        nonzero: the smallest that is rounded to a number other than 0.
        normal: the smallest that is rounded to a normal number.
        overflow: the smallest that is rounded to infinity, or to NaN if the format has
            no infinity.
    """

    nonzero: int
    normal: int
    overflow: int


@functools.cache
def _limits_of(dtype: DTypeLike) -> _Limits:
    """Return the limits of one of `FORMATS`."""
    name = floating_dtype(dtype, "GradientRangeReport: `dtype`").name
    if name not in FORMATS:
        raise ValueError(
            f"GradientRangeReport: expected `dtype` to be one of {', '.join(FORMATS)}, "
            f"got {name}."
        )
    info = jnp.finfo(name)
    kinds = info.smallest_subnormal, info.smallest_normal, info.max
    smallest, normal, largest = map(float, kinds)
    last_place = math.ldexp(1.0, math.frexp(largest)[1] - 1 - info.nmant)
    # Half of the smallest number is rounded to 0, which is even, so that `nonzero` is
    # the next float32. Half a unit below the smallest normal number is rounded up to
    # that. Half a unit above the largest overflows, unless the largest is even (in
    # float8_e4m3fn, where NaN comes next).
    is_even = largest / last_place % 2 == 0
    return _Limits(
        nonzero=_bit_pattern(smallest / 2) + 1,
        normal=_bit_pattern(normal - smallest / 2),
        overflow=_bit_pattern(largest + last_place / 2) + is_even,
    )


def _bit_pattern(value: float) -> int:
    """Return the bits of a positive float32 as an integer, ordered as the values."""
    return int(np.float32(value).view(np.uint32))


@functools.cache
def _octave_cuts() -> tuple[int, ...]:
    """Return the bit patterns at which an octave is cut in two bins."""
    return tuple(sorted({1, *(x for name in FORMATS for x in _limits_of(name))}))


@functools.cache
def _bin_starts() -> tuple[int, ...]:
    """Return the bit pattern of the float32 at which each bin begins.

    The first bin counts 0, the last infinity and NaN. Those in between are octaves,
    from one power of two to the next, cut at the `_Limits` of the formats.
    """
    octaves = (exponent << _EXPONENT_BIT for exponent in range(1, 256))
    return tuple(sorted([0, *_octave_cuts(), *octaves]))


def _values_of(patterns: Any) -> np.ndarray:
    """Return the float32 numbers of bit patterns, as float64; 2^128 for infinity."""
    values = np.asarray(patterns, np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isinf(values), 2.0**128, values)


@jax.jit
def _count(leaf: jax.Array, loss_scale: jax.Array | None = None) -> jax.Array:
    """Return how many values of an array lie in each bin."""
    values = leaf.astype(jnp.float32)
    if loss_scale is not None:
        values = values / jnp.asarray(loss_scale).astype(jnp.float32)
    # Bit patterns of magnitudes are ordered as the floats, so the bin is the exponent
    # plus the number of cuts that the value has passed.
    magnitudes = lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    bins = magnitudes >> jnp.uint32(_EXPONENT_BIT)
    for cut in _octave_cuts():
        bins += (magnitudes >= jnp.uint32(cut)).astype(jnp.uint32)
    return count_bins(bins, len(_bin_starts()))


@dataclass(frozen=True)
class FormatRange:
    """What happens to values that are cast to a format, as shares of all values.

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
        counts: uint32, shape (leaves, bins). A bin is an octave, cut where a format
            rounds to 0, to a subnormal number, or to infinity.
        paths: the path of each leaf, as `jax.tree_util.keystr` writes it.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> grads = {"w": jnp.array([0.0, 2e-8, 1e-3, 3e-2]), "b": jnp.full(4, 3e-6)}
        >>> report = jax.jit(optax_mp.gradient_range_report)(grads)
        >>> report.paths, report.zeros("['w']"), report.best_loss_scale("float16")
        (("['b']", "['w']"), 0.25, 32768.0)
    """

    _legend = "% of values; for each format: underflow / subnormal / overflow"
    _columns = ("values", *(name.removeprefix("float8_") for name in FORMATS))

    def in_format(
        self, dtype: DTypeLike, path: str | None = None, *, loss_scale: float = 1.0
    ) -> FormatRange:
        """Return what happens to the values when they are rounded to a format.

        Args:
            dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
            path: one of `paths`; by default, all leaves together.
            loss_scale: a factor for the values. The result is exact for 1, and for
                other factors to the octave.
        """
        check_settings("in_format", loss_scale=loss_scale)
        counts, starts = self._counts_of(path), _values_of(_bin_starts())
        # With a scale of 1 a bin lies on one side of each limit. With others the middle
        # of a bin decides for all of it.
        middles = loss_scale * (starts[1:-1] + starts[2:]) / 2
        nonzero, normal, overflow = _values_of(_limits_of(dtype))
        finite = counts[1:-1]
        are_subnormal = (middles >= nonzero) & (middles < normal)
        return FormatRange(
            underflow=share(finite[middles < nonzero], counts),
            subnormal=share(finite[are_subnormal], counts),
            overflow=share(finite[middles >= overflow], counts),
        )

    def best_loss_scale(
        self, dtype: DTypeLike = jnp.float16, *, headroom: float = 4.0
    ) -> float:
        """Return the power of two with which a format loses the fewest values.

        Of the scales that leave `headroom` above the largest value, those are best that
        make the fewest values 0, then those that make the fewest subnormal. Of several
        the middle one is returned (the largest, if any value becomes 0). Magnitudes are
        known to the octave, so twice the scale may also fit.

        The scale is for these values only. Gradients within the backward pass can be
        larger than gradients of the params, and both change during training;
        `dynamic_loss_scale` follows them. Infinite values and NaN are ignored, so use
        gradients that did not overflow. The result is NaN if every finite value is 0.

        Args:
            dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
            headroom: the factor by which values may grow before one overflows.

        Raises:
            ValueError: if `headroom` is below 1, or leaves room for no scale.
        """
        if not headroom >= 1:
            raise ValueError(
                f"best_loss_scale: expected `headroom` of at least 1, got {headroom!r}."
            )
        (occupied,) = np.nonzero(self._counts_of(None)[1:-1])
        if not occupied.size:
            return math.nan
        largest = _values_of(_bin_starts()[2 + occupied[-1]])
        room = _values_of(_limits_of(dtype).overflow) / (headroom * largest)
        scales = [2.0**exponent for exponent in range(-126, 127)]
        fits = {x: self.in_format(dtype, loss_scale=x) for x in scales if x <= room}
        if not fits:
            raise ValueError(
                f"best_loss_scale: `headroom` is {headroom:g} and the largest value is "
                f"about {largest:.2g}, so that every loss scale from {scales[0]:.2g} "
                f"on overflows in {jnp.dtype(dtype).name}; pass a smaller `headroom`."
            )
        least = min((fit.underflow, fit.subnormal) for fit in fits.values())
        best = [x for x in fits if (fits[x].underflow, fits[x].subnormal) == least]
        return best[-1 if least[0] else (len(best) - 1) // 2]

    def plot(self, ax: Any = None, path: str | None = None) -> Any:
        """Draw the magnitudes as a histogram, with the limits of float16 as lines.

        Args:
            ax: Matplotlib axes; by default, of a new figure.
            path: one of `paths`; by default, all leaves together.

        Returns:
            The axes.
        """
        ax, counts = axes_or_new(ax), self._counts_of(path)
        exponents = np.floor(np.log2(_values_of(_bin_starts()[1:-1])))
        occupied = exponents[counts[1:-1] > 0]
        edges = np.arange(occupied.min(initial=-24), occupied.max(initial=16) + 2)
        ax.hist(exponents, edges, weights=100 * counts[1:-1] / max(counts.sum(), 1))
        for limit in (-24, 16):
            ax.axvline(limit, color="gray", linestyle="--")
        ax.set(xlabel="exponent of the magnitude, to base 2", ylabel="% of values")
        return ax

    def _cells(self, path: str | None) -> list[str]:
        shares = [self.in_format(name, path) for name in FORMATS]
        return ["/".join(map(percent, dataclasses.astuple(x))) for x in shares]

    def _conclusions(self) -> list[str]:
        if math.isnan(self.best_loss_scale()):
            return ["no loss scale fits: there is no finite value other than 0"]
        lines = []
        if self.not_finite():
            lines.append("of the finite values (use gradients that did not overflow):")
        for name in FORMATS[1:]:
            scale = self.best_loss_scale(name)
            fits = [self.in_format(name, loss_scale=x) for x in (1.0, scale)]
            losses = [f"{percent(x.underflow)}/{percent(x.overflow)}%" for x in fits]
            lines.append(
                f"{name}: best loss scale 2**{int(np.log2(scale))}: under/overflow "
                f"{' -> '.join(losses)}"
            )
        return lines


register_dataclass(GradientRangeReport, ["counts"], ["paths"])


def gradient_range_report(
    grads: PyTree, *, loss_scale: ArrayLike | None = None
) -> GradientRangeReport:
    """Count the values of each leaf by magnitude: what would low precision lose?

    The report tells which share of each leaf would become 0, subnormal or infinite in
    bfloat16, float16 and two 8-bit formats, and which loss scale would fit best, as in
    the histogram of the mixed-precision paper. It takes one pass over the values. Under
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
        % of values; for each format: underflow / subnormal / overflow
                          values  inf, NaN  0  bfloat16  float16   e4m3fn      e5m2
        (the whole tree)   1,000         0  0     0/0/0  57/28/0  100/0/0  77/7.4/0
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
    count = functools.partial(_count, loss_scale=loss_scale)
    where = "gradient_range_report: `grads`"
    return GradientRangeReport(*count_leaves(leaves, count, where, grads))
