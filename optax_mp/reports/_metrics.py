"""metrics: what a training loop logs of its optimizer state."""

from functools import reduce
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, GetAttrKey, keystr, tree_leaves_with_path

from optax_mp._arguments import check_opt_state
from optax_mp._boxes import plain
from optax_mp._states import Path, check_classes, find_states, holds_state
from optax_mp._tree import PyTree, is_array, is_floating, summarize
from optax_mp.scaling._state import LossScaleState

# Fields in which optax's states, and ours, count the steps of an optimizer.
_STEP_COUNTS = ("count", "step_count", "gradient_step")
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_SEVERAL = 2  # Only then places are in names.
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

        For each hyperparameter that `optax.inject_hyperparams` keeps in the state, its
        value in the last step, by its name, such as `"learning_rate"`.

        With several loss scales, or several such sets of hyperparameters, the names
        begin with the part of the path that differs, as in `"generator/loss_scale"`,
        and steps are counted within each loss scale.

    Raises:
        TypeError: if `opt_state` is the optimizer, or arrays that are no state of one,
            such as params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.125)
        >>> tx = optax_mp.dynamic_loss_scale(optax.chain(optax.clip(1.0), adam))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> found = {name: float(x) for name, x in optax_mp.metrics(state).items()}
        >>> found["loss_scale"], found["step_count"], found["learning_rate"]
        (65536.0, 1.0, 0.125)
        >>> sorted(set(found) - {"b1", "b2", "eps", "eps_root"})[:3]
        ['finite_count', 'last_finite', 'learning_rate']
        >>> optax_mp.metrics(optax.sgd(0.1).init(params))
        {}
    """
    check_opt_state(opt_state, "metrics")
    opt_state = plain(opt_state)
    scales = find_states(opt_state, LossScaleState)
    if len(scales) < _SEVERAL:
        scalars = _of_steps(opt_state)
        for _, scale in scales:
            scalars = _of_loss_scale(scale) | scalars
    else:
        scalars = _named(
            [(path, _of_loss_scale(x) | _of_steps(x.inner_state)) for path, x in scales]
        )
    injected = find_states(opt_state, _INJECTED)
    scalars |= _named([(path, _numbers(x.hyperparams)) for path, x in injected])
    if not scales:
        check_classes(opt_state, "metrics")
    if not scalars:
        _check_is_state(opt_state)
    return scalars


def _check_is_state(opt_state: PyTree) -> None:
    """Raise if a tree without metrics has only arrays of numbers, as params do."""
    leaves = jax.tree.leaves(opt_state)
    if leaves and all(map(is_floating, leaves)) and not holds_state(opt_state):
        raise TypeError(
            f"metrics: `opt_state` is {summarize(opt_state)}, expected an optimizer "
            "state; pass what `tx.init(params)` or `tx.update` returned."
        )


def _numbers(hyperparams: dict[str, Any]) -> dict[str, jax.Array]:
    return {k: x for k, x in hyperparams.items() if is_array(x) and not x.shape}


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
    # A state may be a dict.
    names = [kind(x) for kind in (GetAttrKey, DictKey) for x in _STEP_COUNTS]
    is_count = bool(path) and path[-1] in names
    return is_count and is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer)


def _named(groups: list[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Return the scalars of several places in one dict, by names that differ."""
    paths = [path for path, _ in groups]
    places = _tell_apart(paths) if len(paths) >= _SEVERAL else [[] for _ in paths]
    return {
        "/".join([*place, name]): x
        for place, (_, scalars) in zip(places, groups, strict=True)
        for name, x in scalars.items()
    }


def _tell_apart(paths: list[Path]) -> list[list[str]]:
    """Return the names along each path, without common first and last names."""
    names = [[keystr((key,), simple=True) for key in path] for path in paths]
    names = [way[_count_common(names) :] for way in names]
    backwards = [way[::-1] for way in names]
    return [way[: len(way) - _count_common(backwards)] for way in names]


def _count_common(ways: list[list[str]]) -> int:
    """Return how many names at their beginning all have in common."""
    columns = zip(*ways, strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
