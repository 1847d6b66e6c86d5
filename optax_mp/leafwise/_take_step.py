"""take_step, and the update of a transformation of this package, in one pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from optax_mp._context import with_context
from optax_mp._inner import as_transformation, or_no_change
from optax_mp._jax._arrays import has_tracers
from optax_mp._jax._memory import is_on_host
from optax_mp._leaves import is_absent
from optax_mp._warnings import warn_once
from optax_mp.leafwise._engine import Step, run_step
from optax_mp.leafwise._from_host import run_from_host
from optax_mp.leafwise._layout import spread_shardings
from optax_mp.leafwise._tails import NO_LOW_BITS

Gather = Callable[[Any, Any], tuple[Any, Any]]


def take_step(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    *,
    param_shardings: Any = None,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Return (params, opt_state) after one step.

    The same as

    ```python
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    params = optax.apply_updates(params, updates)
    ```

    but with less memory traffic for leaves that `Split`, `low_bit_state` and
    `stochastic_rounding` store in low-bit form. On TPUs and GPUs the step of such a
    leaf runs in one kernel, which reads and writes each array once, in place. `tx` can
    be any optimizer: its update is traced, and whatever is not elementwise, such as a
    global norm, is computed before the kernels. Outside of `jit`, within `vmap` or
    `grad`, and if the update has effects, such as `jax.debug.print`, there are no
    kernels, and a warning says so. A step that a loss scale skips changes no bit of a
    param, except that a NaN may become the dtype's usual NaN.

    A kernel is used in a program for one device, inside `jax.shard_map` over all axes
    of a mesh, and on sharded arrays if their types or `param_shardings` say how they
    are sharded, or if they are arguments of the function that `jit` compiles.
    Elsewhere, on other platforms, and for small leaves, XLA compiles the step as it
    does `tx.update`. On a TPU it takes a large leaf chunk by chunk.
    `step_report` says which leaves have a kernel, and why others have none.
    `tx.update` runs kernels on a TPU as well, but has to write the updates.
    `OPTAX_MP_KERNELS=0` in the environment turns kernels off.

    Args:
        tx: any optax optimizer or chain.
        grads: the gradients.
        opt_state: its state.
        params: the params.
        param_shardings: how the params are sharded under `jit`, for a step in a loop or
            in a `jit` within `jit`: a tree of shardings like the params, or a prefix of
            one, such as `jax.tree.map(lambda p: p.sharding, params)` before `jit`. The
            state of a param must be sharded as the param is, as `tx.init` makes it.
        extra_args: for `tx.update`.

    Returns:
        The new params and the new state. Donate both to `jit` to overwrite the old.

    Raises:
        ValueError: if `param_shardings` does not fit the params.
        TypeError: if it holds anything but shardings, or `tx` is no optimizer.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(
        ...     optax_mp.low_bit_state(optax.adamw(0.1)), storage=optax_mp.Split(8)
        ... )
        >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
        >>> opt_state = tx.init(params)
        >>> @jax.jit
        ... def step(grads, opt_state, params):
        ...     return optax_mp.take_step(tx, grads, opt_state, params)
        >>> params, opt_state = step(params, opt_state, params)
        >>> float(params["w"][0, 0])
        0.8984375
    """
    caller, offloaded = "take_step", getattr(tx, "offloaded", None)
    is_hosted = any(map(is_on_host, jax.tree.leaves(opt_state)))
    is_hosted &= has_tracers((grads, opt_state, params))
    plan, of_offload = offloaded if offloaded and is_hosted else (None, None)
    if plan is not None:
        extra_args = with_context(extra_args, is_in_take_step=True)
        if param_shardings is None:
            caller, param_shardings = "offload", of_offload
    step, inputs, kept, shardings, gather = whole_step(
        caller, tx, grads, opt_state, params, param_shardings, extra_args
    )
    if plan is not None:
        plan = plan._replace(shardings=shardings)
        result = run_from_host(step, inputs, kept, plan) or step(inputs, kept)
        _, (opt_state, params) = result
        return gather(params, opt_state)
    (_, (opt_state, params)), obstacle = run_step(
        step, inputs, kept, shardings, state=kept[0]
    )
    if obstacle not in (None, NO_LOW_BITS):
        warn_once(
            "take_step: this step runs without kernels: "
            f"{obstacle}. XLA compiles it like `tx.update`. Call `take_step` in "
            "a function that `jax.jit` compiles, with all state on the device."
        )
    return gather(params, opt_state)


def whole_step(
    name: str,
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    param_shardings: Any,
    extra_args: dict[str, Any],
) -> tuple[Step, Any, Any, list[NamedSharding | None], Gather]:
    """Return the arguments of `run_step` for the function `name`.

    And from the new params and state of that step to those of `tx`.
    """
    shardings = [None] * len(jax.tree.leaves(opt_state))
    shardings += spread_shardings(params, param_shardings, name)
    gather: Gather = lambda params, opt_state: (params, opt_state)  # noqa: E731
    update = as_transformation(tx, name, "tx").update
    if in_parts := getattr(tx, "in_parts", None):
        part = in_parts(grads, opt_state, params, extra_args)
        update, grads, opt_state, params, extra_args, shardings, cuts = part
        gather = cuts.gather

    def step(inputs: Any, kept: Any) -> Any:
        grads, extra_args = inputs
        opt_state, params = kept
        updates, opt_state = update(grads, opt_state, params, **extra_args)
        return None, (opt_state, _apply_updates(params, updates))

    return step, (grads, extra_args), (opt_state, params), shardings, gather


def _apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Return what `optax.apply_updates` does; a param whose update is None stays."""

    def apply(param: Any, update: Any) -> Any:
        update = or_no_change(update, param)
        return param if is_absent(update) else optax.apply_updates(param, update)

    # It adds float32 updates to 16-bit params, and casts back.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(apply, params, updates, is_leaf=lambda x: x is None)


def leafwise_update(
    update: Callable[..., tuple[Any, Any]],
    shardings: Sequence[NamedSharding | None] = (),
) -> Any:
    """Return the update of a transformation, in one pass where that is less traffic.

    The new param is computed outside, in one more pass. So kernels pay on a TPU, where
    XLA alone passes over packed arrays several times, with branches, and with shifts.

    Args:
        update: the update.
        shardings: of the leaves of the state under `jit`, as in `run_step`.
    """

    @functools.wraps(update)
    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        # A function among the arguments, as for a line search, may have side effects.
        if any(map(callable, jax.tree.leaves(extra_args))):
            return update(updates, state, params, **extra_args)

        def step(inputs: Any, kept: Any) -> tuple[Any, Any]:
            updates, params, extra_args = inputs
            return update(updates, kept, params, **extra_args)

        inputs = updates, params, extra_args
        result, _ = run_step(step, inputs, state, shardings, platforms=("tpu",))
        return result

    return update_fn
