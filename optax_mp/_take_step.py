"""take_step: update and apply in one pass over memory, by the engine."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from optax_mp._jax._arrays import has_tracers, is_on_host
from optax_mp._warnings import warn_once
from optax_mp.trees._descriptions import spread_shardings
from optax_mp.trees._leaves import is_absent
from optax_mp.wrappers._context import may_hold_codes, with_context
from optax_mp.wrappers._inner import as_transformation, or_no_change

# Takes what a step reads, and what it replaces; returns its result and the new values.
StepFn = Callable[[Any, Any], tuple[Any, Any]]


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
    kernels, with a warning. A step that a loss scale skips changes no bit of a
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
    step, inputs, kept, shardings, gather = bind_step(
        caller, tx, grads, opt_state, params, param_shardings, extra_args
    )
    if plan is not None:
        from optax_mp.engine import step_from_host

        plan = plan._replace(shardings=shardings)
        result = step_from_host(step, inputs, kept, plan) or step(inputs, kept)
    elif may_hold_codes(kept):
        from optax_mp.engine import run_step

        result, obstacle = run_step(step, inputs, kept, shardings)
        if obstacle is not None:
            warn_once(
                "take_step: this step runs without kernels: "
                f"{obstacle}. XLA compiles it like `tx.update`. Call `take_step` in "
                "a function that `jax.jit` compiles, with all state on the device."
            )
    else:
        result = step(inputs, kept)
    _, (opt_state, params) = result
    return gather(params, opt_state)


def bind_step(
    name: str,
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    param_shardings: Any,
    extra_args: dict[str, Any],
) -> tuple[StepFn, Any, Any, list[NamedSharding | None], Callable[..., Any]]:
    """Return the arguments of `run_step` for the function `name`.

    The last item turns the params and state of that step into the new ones of `tx`.
    """
    gather: Callable[..., Any] = lambda *whole: whole  # noqa: E731
    update = as_transformation(tx, name, "tx").update
    shardings: list[Any] | None = None
    if in_parts := getattr(tx, "in_parts", None):
        part = in_parts(grads, opt_state, params, extra_args)
        update, grads, opt_state, params, extra_args, shardings, cuts = part
        gather = cuts.gather
    if shardings is None:
        shardings = [None] * len(jax.tree.leaves(opt_state))
        if param_shardings is not None:
            shardings += spread_shardings(params, param_shardings, name)

    def step(inputs: Any, kept: Any) -> Any:
        grads, extra_args = inputs
        opt_state, params = kept
        updates, opt_state = update(grads, opt_state, params, **extra_args)
        return None, (opt_state, apply_updates(params, updates))

    return step, (grads, extra_args), (opt_state, params), shardings, gather


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Return what `optax.apply_updates` does; a param whose update is None stays."""

    def apply(param: Any, update: Any) -> Any:
        update = or_no_change(update, param)
        return param if is_absent(update) else optax.apply_updates(param, update)

    # It adds float32 updates to 16-bit params, and casts back.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(apply, params, updates, is_leaf=lambda x: x is None)
