"""metrics: what a training loop logs of its optimizer state."""

from functools import reduce
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

from optax_mp._arguments import check_opt_state, warn_unless_state
from optax_mp._nnx import plain_state
from optax_mp._states import Path, check_classes, find_states
from optax_mp._tree import PyTree, is_array
from optax_mp.loss_scale._state import LossScaleState

# Fields in which optax's states, and ours, count the steps of an optimizer.
_STEP_COUNTS = ("count", "step_count", "gradient_step")
# States whose counts start anew, or at 1.
_OTHER_COUNTS = (optax.contrib.ReduceLROnPlateauState, optax.contrib.ScheduleFreeState)


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Return the scalars of an optimizer state that a training loop logs.

    They are found at any depth of wrappers, and keep their names as long as the
    structure of the state stays the same. Call this under `jit` or outside; it does not
    wait for the values, as `float(value)` does.

    Args:
        opt_state: any optimizer state, or a tree of several. Or an `nnx.Optimizer`.

    Returns:
        A dict of scalars, which may be empty. If the state holds a loss scale:

        - `"loss_scale"`: the scale for the next step, float32;
        - `"finite_count"`: finite steps in a row since growth was last due;
        - `"skipped_count"`: steps skipped since the last finite one;
        - `"total_skipped_count"`: steps skipped since `init`;
        - `"last_finite"`: whether the last step was finite, a bool.

        If a transformation in it counts steps, as Adam and schedules do:

        - `"step_count"`: the steps that the optimizer has taken, the largest such
          count. Skipped steps count only with a loss scale that is a link in a chain.

        For several loss scales the names begin with what tells their places apart, as
        in `"generator/loss_scale"`. The steps are then those counted within each one.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> clipped = optax.chain(optax.clip(1.0), optax.adam(1e-3))
        >>> tx = optax_mp.dynamic_loss_scale(clipped)
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> for name, value in optax_mp.metrics(state).items():
        ...     print(name, float(value))
        loss_scale 65536.0
        finite_count 1.0
        skipped_count 0.0
        total_skipped_count 0.0
        last_finite 1.0
        step_count 1.0
        >>> optax_mp.metrics(optax.sgd(0.1).init(params))
        {}
    """
    opt_state = plain_state(opt_state)
    check_opt_state(opt_state, "metrics")
    found = find_states(opt_state, LossScaleState)
    if not found:
        check_classes(opt_state, "metrics")
        warn_unless_state(opt_state, "metrics")
        return _of_steps(opt_state)
    if len(found) == 1:
        return _of_loss_scale(found[0][1]) | _of_steps(opt_state)
    named: dict[str, jax.Array] = {}
    places = _tell_apart([path for path, _ in found])
    for place, (_, state) in zip(places, found, strict=True):
        scalars = _of_loss_scale(state) | _of_steps(state.inner_state)
        named |= {"/".join([*place, name]): x for name, x in scalars.items()}
    return named


def _of_loss_scale(state: LossScaleState) -> dict[str, jax.Array]:
    return {
        "loss_scale": state.scale,
        "finite_count": state.finite_count,
        "skipped_count": state.skipped_count,
        "total_skipped_count": state.total_skipped_count,
        "last_finite": state.last_finite,
    }


def _of_steps(state: PyTree) -> dict[str, jax.Array]:
    leaves = _leaves_of_counters(state)
    counts = [leaf for path, leaf in leaves if _counts_steps(path, leaf)]
    return {"step_count": reduce(jnp.maximum, counts)} if counts else {}


def _leaves_of_counters(state: PyTree) -> list[tuple[Path, Any]]:
    """Return leaves with their paths, without the own counts of some states."""
    others = {
        (*path, GetAttrKey(name))
        for path, _ in find_states(state, _OTHER_COUNTS)
        for name in _STEP_COUNTS
    }
    leaves = tree_leaves_with_path(state)
    return [(path, leaf) for path, leaf in leaves if path not in others]


def _counts_steps(path: Path, leaf: Any) -> bool:
    is_count = bool(path) and path[-1] in map(GetAttrKey, _STEP_COUNTS)
    return is_count and is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer)


def _tell_apart(paths: list[Path]) -> list[list[str]]:
    """Return the names along each path, without those that all begin or end with."""
    names = [[keystr((key,), simple=True) for key in path] for path in paths]
    names = [way[_count_common(names) :] for way in names]
    backwards = [way[::-1] for way in names]
    return [way[: len(way) - _count_common(backwards)] for way in names]


def _count_common(ways: list[list[str]]) -> int:
    """Return how many names at their beginning all have in common."""
    columns = zip(*ways, strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
