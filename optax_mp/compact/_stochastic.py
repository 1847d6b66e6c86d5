"""stochastic_rounding: train 16-bit params without masters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_mp.compact import _rounding
from optax_mp.core import _dtypes, _random_numbers
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.trees import _states, _tree
from optax_mp.core.trees._descriptions import place_like_params
from optax_mp.core.trees._leaves import Leaves
from optax_mp.core.wrappers import _arguments
from optax_mp.core.wrappers._choose import choose_step, is_unmarked
from optax_mp.core.wrappers._protocol import Transformation, as_transformation
from optax_mp.core.wrappers._updates import difference

_CALLER = "stochastic_rounding"


@_states.own_state
class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Its structure, shapes and dtypes never change.

    Attributes:
        step_count: int32 `[]`, the number of updates. Rounding draws new random
            numbers at each one.
        inner_state: the state of the inner optimizer, made for float32 params. Its
            public fields, such as `hyperparams`, are also attributes of this state.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.stochastic_rounding(optax.adam(1e-3))
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> int(state.step_count), state.inner_state[0].nu["w"].dtype.name
        (0, 'float32')
    """

    step_count: jax.Array
    inner_state: optax.OptState
    __getattr__ = _states.inner_field


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    """Train 16-bit params without masters, rounding them stochastically.

    The inner optimizer sees params, gradients and state in float32. The new param is
    rounded to one of its two neighbours in the param's dtype. The nearer one is more
    likely, so that the expectation is the float32 param: an update of a hundredth of a
    unit in the last place moves the param by a whole unit in one of a hundred steps.
    Masters are more exact, because params that are rounded at random walk about their
    trajectory. They cost 1 to 4 more bytes per weight.

    The random numbers are a hash of position, step and `seed`: a run can be reproduced,
    also from a checkpoint and, under `jit`, on any number of devices. Leaves of 32 or
    more bits are updated as `inner` does, and leaves that are not floating are hidden
    from it. Updates of 16-bit leaves are always float32, because fewer bits would round
    them again. For derivatives through `update`, rounding is the identity. If a loss
    scale is an earlier link of the same chain, a step that it skips is also skipped
    here entirely.

    Args:
        inner: any optax optimizer or chain.
        seed: an integer for the random numbers, traced if each member of a `vmap` needs
            its own.

    Returns:
        The transformation. Extra arguments of `update` are passed to `inner`.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or `seed` is not an
            integer.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.stochastic_rounding(optax.sgd(1.0))
        >>> params = {"w": jnp.ones(1000, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     grads = {"w": jnp.full(1000, 0.001, jnp.bfloat16)}
        ...     updates, state = tx.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> round(float(params["w"].astype(jnp.float32).mean()), 2)
        0.9

    References:
        Zamirai et al., Revisiting BFloat16 Training, 2020,
        https://arxiv.org/abs/2010.06192
    """
    inner = as_transformation(inner, _CALLER)
    _rounding.check_seed(seed, _CALLER)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        leaves = Leaves.of(params, caller=_CALLER)
        for path, leaf in zip(leaves.paths, leaves.values, strict=True):
            if _dtypes.is_floating(leaf) and _dtypes.bits(leaf.dtype) < 16:
                raise ValueError(
                    f"stochastic_rounding: expected param {_tree.spell(path)} in 16 "
                    f"bits or more, got {_arrays.describe(leaf)}; use "
                    "`mixed_precision`, with `update_dtype='params'`."
                )
        wide = leaves.unflatten(map(_widen, leaves.values))
        inner_state = place_like_params(inner.init(wide), wide)
        inner_state = _tree.copy_shared(inner_state, leaves.values)
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner_state)

    def update_fn(
        updates: Any, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        _arguments.require_params(params, _CALLER)
        _arguments.check_own_state(state, StochasticRoundingState, _CALLER)
        leaves = Leaves.of(params, caller=_CALLER)
        arguments = _arguments.MatchedArguments.match(updates, params, leaves)
        _warn_unless_narrow(leaves)
        wide = list(map(_widen, leaves.values))

        def step(state: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
            keys = _random_numbers.rounding_keys(len(wide), seed, state.step_count)

            def advance(i: int, change: Any) -> Any:
                if not _is_narrow(leaves.values[i]):
                    return change
                target: Any = optax.apply_updates(wide[i], change)
                rounded = _round_jitted(target, leaves.values[i].dtype, keys[i])
                return difference(rounded, wide[i])

            new_updates, inner_state = arguments.run(
                inner, wide, state.inner_state, extra_args, advance
            )
            count = jnp.asarray(optax.safe_increment(state.step_count))
            new_state = StochasticRoundingState(count, inner_state)
            return leaves.unflatten(new_updates), new_state

        return choose_step(is_unmarked(updates, extra_args), step, state, extra_args)

    return Transformation.of(_CALLER, init_fn, update_fn)


# So that params of one shape and dtype are traced once.
_round_jitted = jax.jit(_rounding.round_stochastically, static_argnums=1)


def _is_narrow(param: Any) -> bool:
    return _dtypes.is_floating(param) and _dtypes.bits(param.dtype) < 32


def _warn_unless_narrow(params: Leaves) -> None:
    """Warn if no param is rounded: the state does not say which dtype they had."""
    floating = [
        i for i, param in enumerate(params.values) if _dtypes.is_floating(param)
    ]
    if floating and not any(map(_is_narrow, params.values)):
        i = floating[0]
        warn(
            "stochastic_rounding: there is nothing to round, because no param has 16 "
            f"bits (param {_tree.spell(params.paths[i])} is "
            f"{_arrays.describe(params.values[i])}); cast the params, and use "
            "`optax.apply_updates`, not `equinox.apply_updates`."
        )


def _widen(param: Any) -> Any:
    """Return what `inner` sees of a leaf: float32 or wider; nothing if it is hidden."""
    return (
        param.astype(jnp.float32)
        if _is_narrow(param)
        else _arguments.as_inner_param(param)
    )
