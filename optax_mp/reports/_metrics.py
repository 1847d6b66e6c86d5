"""metrics: what a training loop logs of its optimizer state."""

from functools import reduce
from itertools import compress, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, keystr, tree_leaves_with_path

from optax_mp.core.jax_api import _arrays
from optax_mp.core.scaling._state import LossScaleState, is_at_floor, is_skipped_by_loss
from optax_mp.core.trees import _states, _tree
from optax_mp.core.trees._boxes import plain
from optax_mp.core.wrappers._mistakes import check_opt_state, warn_unless_state

# Fields of optax's states, and ours, that count the steps of an optimizer.
_STEP_COUNTS = ("count", "step_count", "gradient_step")
# Fields of a loss scale that are logged by their names.
_LOGGED = "finite_count", "skipped_count", "total_skipped_count", "last_finite"
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
# States whose counts start again, or at 1.
_OTHER_COUNTS = (optax.contrib.ReduceLROnPlateauState, optax.contrib.ScheduleFreeState)


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Return the scalars of an optimizer state that a training loop logs.

    They are found at any depth of wrappers, and keep their names as long as the
    structure of the state stays the same. Call this under `jit` or outside; it does not
    wait for the values, as `float(value)` does.

    Args:
        opt_state: any optimizer state, a tree of several, or an `nnx.Optimizer`.

    Returns:
        A dict of scalars, which may be empty. If the state holds a loss scale:

        - `"loss_scale"`: the scale for the next step, float32;
        - `"finite_count"`: finite steps in a row since growth was last due;
        - `"skipped_count"`: steps skipped since the last finite one;
        - `"total_skipped_count"`: steps skipped since `init`;
        - `"last_finite"`: whether the last step was finite, a bool;
        - `"skipped_by_loss"`: whether the loss of the last skipped step, as `value` of
          `tx.update`, was not finite, a bool: the data or the model is to blame, and
          the scale was kept. Without `value` it is False;
        - `"at_min_scale"`: whether a step overflowed with the scale at its lower bound,
          and growth has not been due since, a bool. `check_loss_scale` says why.

        If a transformation in the state counts steps, as Adam and schedules do:

        - `"step_count"`: the steps that the optimizer has taken, the largest such
          count; with `optax.MultiSteps`, the steps of the optimizer inside it. Skipped
          steps count only with a loss scale that is a link in a chain.

        For each hyperparameter that `optax.inject_hyperparams` keeps in the state, its
        value in the last step, by its name, such as `"learning_rate"`.

        With several loss scales, or several such sets of hyperparameters, the names
        begin with the part of the path that differs, as in `"generator/loss_scale"`,
        and steps are counted within each loss scale.

    Raises:
        TypeError: if `opt_state` is the optimizer.

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
        ['at_min_scale', 'finite_count', 'last_finite']
        >>> optax_mp.metrics(optax.sgd(0.1).init(params))
        {}
    """
    check_opt_state(opt_state, "metrics")
    opt_state = plain(opt_state)
    scales = _states.find_states(opt_state, LossScaleState)
    # Beside a single loss scale, which may be a link in a chain, all steps are its own.
    steps = {} if scales[1:] else _of_steps(opt_state)
    groups = [
        (path, _fields(x) | (steps or _of_steps(x.inner_state))) for path, x in scales
    ]
    scalars = _named(groups) or steps
    injected = _states.find_states(opt_state, _INJECTED)
    scalars |= _named([(path, _numbers(x.hyperparams)) for path, x in injected])
    if not scales:
        _states.check_classes(opt_state, "metrics")
    if not scalars:
        warn_unless_state(opt_state, "metrics")
    # Not the arrays of the state, which a donated step deletes.
    values = _tree.copy_shared(list(scalars.values()), opt_state)
    return dict(zip(scalars, values, strict=True))


def _numbers(hyperparams: dict[str, Any]) -> dict[str, jax.Array]:
    return {k: x for k, x in hyperparams.items() if _arrays.is_array(x) and not x.shape}


def _fields(state: LossScaleState) -> dict[str, jax.Array]:
    logged = {x: getattr(state, x) for x in _LOGGED}
    return {
        "loss_scale": state.scale,
        **logged,
        "skipped_by_loss": is_skipped_by_loss(state),
        "at_min_scale": jnp.asarray(is_at_floor(state)),
    }


def _of_steps(state: _tree.PyTree) -> dict[str, jax.Array]:
    # A count outside of `optax.MultiSteps` is of micro-steps.
    nested = [x for _, x in _states.find_states(state, optax.MultiStepsState)]
    innermost = [
        x for x in nested if len(_states.find_states(x, optax.MultiStepsState)) == 1
    ]
    state = innermost or state
    others = [path for path, _ in _states.find_states(state, _OTHER_COUNTS)]
    counts = [
        leaf
        for path, leaf in tree_leaves_with_path(state)
        if keystr(path[-1:], simple=True) in _STEP_COUNTS and path[:-1] not in others
        if _arrays.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    return {"step_count": reduce(jnp.maximum, counts)} if counts else {}


def _named(groups: list[tuple[_states.Path, dict[str, Any]]]) -> dict[str, Any]:
    """Return the scalars of several places in one dict, by names that differ."""
    # At places where all paths have the same key, it tells nothing apart.
    columns = zip_longest(*[path for path, _ in groups])
    differs = [len(set(keys)) > 1 for keys in columns]
    return {
        keystr((*compress(path, differs), DictKey(name)), simple=True, separator="/"): x
        for path, scalars in groups
        for name, x in scalars.items()
    }
