"""take_step: `tx.update` and `optax.apply_updates` in one pass over memory."""

from typing import Any

import optax

from optax_mp._inner import as_transformation
from optax_mp.leafwise._step import run_leafwise


def take_step(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Return (params, opt_state) after one step.

    The same as

    ```python
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    ```

    with less traffic to memory for what is stored in few bits, that is `Split`,
    `low_bit_state` and `stochastic_rounding`. On TPUs and GPUs all that a step does to
    one element is then done in one kernel, which reads and writes every array once and
    in place. `tx` can be any optimizer: its update is traced, and what does not go
    element by element, as a global norm, is computed before.

    A kernel is taken where a program is for one device, and inside of
    `jax.shard_map`. On arrays that `jit` shards, on other platforms, and for small
    leaves, XLA compiles what `tx.update` says, as it would without this function.

    Args:
        tx: any optax optimizer or chain.
        grads: the gradients.
        opt_state: its state.
        params: the params.
        extra_args: for `tx.update`.

    Returns:
        The new params and the new state. Donate both to `jit` to overwrite the old.

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
    tx = as_transformation(tx, "take_step", "tx")

    def step(given: Any, kept: Any) -> Any:
        grads, extra_args = given
        opt_state, params = kept
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return None, (opt_state, optax.apply_updates(params, updates))

    given, kept = (grads, extra_args), (opt_state, params)
    _, (opt_state, params) = run_leafwise(step, given, kept, ("tpu", "cuda"))
    return params, opt_state
