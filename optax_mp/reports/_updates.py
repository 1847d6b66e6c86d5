"""update_report: which updates are too small to move their params?"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike

from optax_mp._table import Table, percent
from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays
from optax_mp.core.trees import _tree
from optax_mp.core.trees._boxes import plain
from optax_mp.core.trees._leaves import Leaves
from optax_mp.reports import _leaf_counts

# What an update of 0 means in the forms whose updates are differences of params.
_KEPT = "masters keep what is 0 here; Split(8) and stochastic_rounding do on average"
_BINS = _ZERO, _STALLED, _MOVED, _NOT_FINITE = range(4)


@dataclass(frozen=True, eq=False)
class UpdateReport(_leaf_counts.LeafCounts):
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

        titles = ("elements", "stalled", "moved")
        return ["% of elements", self._table(titles, cells), *self._summary()]

    def _summary(self) -> list[str]:
        """Return what is lost, whatever form of training the updates are of."""
        others = self.stalled() + self.moved()
        if self.stalled():
            stalled = f"{percent(self.stalled() / others)}% of the updates other than 0"
            return [f"{stalled} do not move their param: lost without masters"]
        first = "every update other than 0 moves its param"
        if not others:
            first = "no update is finite and other than 0"
        return [first, _KEPT] if self.zeros() else [first]


register_dataclass(UpdateReport, ["counts"], ["paths"])


def update_report(
    params: optax.Params, updates: optax.Updates, *, dtype: DTypeLike | None = None
) -> UpdateReport:
    """Count the updates of each leaf that are too small to move its params.

    A bfloat16 weight of 1.0 that receives an update of -0.001 stays 1.0, because this
    is less than half a unit in the last place. The report tells how many elements
    stall like this, as `optax.apply_updates` adds and rounds. Updates that are exactly
    0 are counted apart.

    - Plain 16-bit training: pass the params and the updates of the optimizer. What
      stalls is lost.
    - float32 training: add `dtype=jnp.bfloat16` to see what 16-bit params would lose.
    - `mixed_precision`: nothing stalls and nothing is lost. Its updates are differences
      of rounded params, so each of them is 0 or moves its param, and the masters keep
      the rest: exactly, or with `Split(8)` rounded at random, without bias. To see what
      the masters save, pass the masters before the step, the change of the masters, and
      the `dtype` of the params::

          masters = optax_mp.master_params(opt_state, params)
          # ... the step ...
          after = optax_mp.master_params(opt_state, params)
          change = jax.tree.map(jnp.subtract, after, masters)
          print(optax_mp.update_report(masters, change, dtype=jnp.bfloat16))

    - `stochastic_rounding`: nothing stalls. An update that is too small moves its param
      at random, without bias.

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
        50% of the updates other than 0 do not move their param: lost without masters
    """
    if dtype is not None:
        dtype = _dtypes.floating_dtype(dtype, "update_report: `dtype`")
    params, updates = plain(params), plain(updates)
    leaves = Leaves.of(params, caller="update_report", name="`params`")
    pairs = zip(leaves.values, leaves.match(updates, "`updates`"), strict=True)
    found = {
        _tree.spell(path): pair
        for path, pair in zip(leaves.paths, pairs, strict=True)
        if all(map(_dtypes.is_floating, pair))
    }
    for path, (param, update) in found.items():
        if param.shape != update.shape:
            raise ValueError(
                f"update_report: expected the update of {path} to have the shape of "
                f"the param {_arrays.describe(param)}, got {_arrays.describe(update)}."
            )
    count, where = partial(_count_moves, dtype=dtype), "update_report: `params`"
    return UpdateReport(*_leaf_counts.count_leaves(where, params, found, count))


@partial(jax.jit, static_argnames="dtype")
def _count_moves(param: jax.Array, update: jax.Array, dtype: Any = None) -> jax.Array:
    """Return how many elements lie in each bin."""
    dtype = param.dtype if dtype is None else dtype
    wide = jnp.result_type(
        *map(_dtypes.at_least_float32, (param.dtype, update.dtype, dtype))
    )
    old, change = _dtypes.round_to(param.astype(wide), dtype), update.astype(wide)
    # Not by casts, which XLA may leave out.
    moves = _dtypes.round_to(old + change, dtype) != old
    bins = jnp.where(change == 0, _ZERO, jnp.where(moves, _MOVED, _STALLED))
    are_finite = jnp.isfinite(param) & jnp.isfinite(update)
    return _leaf_counts.count_bins(jnp.where(are_finite, bins, _NOT_FINITE), len(_BINS))
