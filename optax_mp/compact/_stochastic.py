"""stochastic_rounding: 16-bit params without masters, right on average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_mp._dtypes import bits
from optax_mp._inner import (
    as_transformation,
    in_precision_of,
    own_master,
    without_aliases,
)
from optax_mp._jax._choose import choose_step
from optax_mp._jax._placement import place_like_params
from optax_mp._leaves import Leaves, is_absent
from optax_mp._tree import describe, is_floating, is_inexact, place
from optax_mp.compact._dither import chance_keys, check_seed, rounded_by_chance
from optax_mp.loss_scale._mark import is_unmarked
from optax_mp.masters._checks import check_gradient, check_update


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Its structure, shapes and dtypes never change.

    Attributes:
        step: int32 scalar, how many updates were made; the chance hangs on it.
        inner_state: the state of the inner optimizer, over float32 params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.stochastic_rounding(optax.adam(1e-3))
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> int(state.step), state.inner_state[0].nu["w"].dtype.name
        (0, 'float32')
    """

    step: jax.Array
    inner_state: optax.OptState


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Train 16-bit params without masters, rounding each update up or down by chance.

    The inner optimizer sees params, gradients and state in float32. What it makes of a
    param is rounded to one of the two neighbours in the param's dtype, the nearer one
    more often, so that the expectation is what float32 would have: an update of a
    hundredth of a unit in the last place moves the param by a whole unit in one of a
    hundred steps. Masters are more exact (a param here makes a random walk about its
    trajectory) but cost 1 to 4 bytes a weight more.

    The chance is a hash of the place in the array, the step and `seed`: a run is
    reproduced, also from a checkpoint and, under `jit`, on any number of devices.
    Leaves of 32 bits and more are updated as by `inner`; what is not floating is hidden
    from it. Updates of 16-bit leaves are float32 whatever the gradients are, for in
    fewer bits they would be rounded again. Float32 gradients that are all negative
    zero, the mark of a step that a loss scale skips, move nothing.

    Args:
        inner: any optax optimizer or chain.
        seed: another one for another run.

    Returns:
        The transformation; extra arguments of `update` reach `inner`.

    Raises:
        TypeError: if `inner` is not a gradient transformation.

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
    inner = as_transformation(inner, "stochastic_rounding")
    check_seed(seed, "stochastic_rounding", or_none=False)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        leaves = Leaves.of(params, caller="stochastic_rounding", name="`params`")
        for path, leaf in zip(leaves.paths, leaves.values, strict=True):
            if is_floating(leaf) and bits(leaf.dtype) < 16:
                raise ValueError(
                    f"stochastic_rounding: param {place(path)} is {describe(leaf)}, "
                    "expected 16 bits or more, since JAX adds no float32 update to an "
                    "8-bit float; use `optax_mp.mixed_precision` with "
                    '`update_dtype="params"`.'
                )
        seen = leaves.unflatten(map(_in_float32, leaves.values))
        inner_state = place_like_params(inner.init(seen), seen)
        inner_state = without_aliases(inner_state, leaves.values)
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner_state)

    def update_fn(
        updates: Any, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        if params is None:
            raise ValueError(
                "stochastic_rounding: `params` is None, expected the current params; "
                "call `tx.update(grads, state, params)`."
            )
        if not isinstance(state, StochasticRoundingState):
            raise TypeError(
                f"stochastic_rounding: `state` is a {type(state).__name__}, expected "
                "the StochasticRoundingState that `init` of this transform returns."
            )
        leaves = Leaves.of(params, caller="stochastic_rounding", name="`params`")
        grads = leaves.match(updates, "the gradients")
        for path, param, grad in zip(leaves.paths, leaves.values, grads, strict=True):
            check_gradient(path, param, grad, "stochastic_rounding")
        seen = list(map(_in_float32, leaves.values))
        if extra_args.get("grad") is not None:
            grad = leaves.match(extra_args["grad"], "the extra argument `grad`")
            extra_args["grad"] = leaves.unflatten(map(in_precision_of, seen, grad))

        def step(state: Any) -> tuple[Any, Any]:
            changes, inner_state = inner.update(
                leaves.unflatten(map(in_precision_of, seen, grads)),
                state.inner_state,
                leaves.unflatten(seen),
                **extra_args,
            )
            moved = list(grads)
            changes = leaves.match(changes, "the updates of `inner`")
            keys = chance_keys(len(changes), seed, state.step)
            for i, change in enumerate(changes):
                path, param = leaves.paths[i], leaves.values[i]
                if not is_inexact(param):
                    continue
                moved[i] = change
                if is_absent(change):
                    continue
                check_update(path, param, grads[i], change, "stochastic_rounding")
                if _is_narrow(param):
                    target: Any = optax.apply_updates(seen[i], change)
                    moved[i] = rounded_by_chance(target, param.dtype, keys[i]) - seen[i]
            count = jnp.asarray(optax.safe_increment(state.step))
            return leaves.unflatten(moved), StochasticRoundingState(count, inner_state)

        return choose_step(is_unmarked(updates), step, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_narrow(param: Any) -> bool:
    return is_floating(param) and bits(param.dtype) < 32


def _in_float32(param: Any) -> Any:
    return param.astype(jnp.float32) if _is_narrow(param) else own_master(param)
