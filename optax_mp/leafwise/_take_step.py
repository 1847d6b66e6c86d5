"""take_step: `tx.update` and `optax.apply_updates` in one pass over memory."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, Sharding

from optax_mp._inner import as_transformation
from optax_mp._jax._arrays import is_traced
from optax_mp.leafwise._step import run_leafwise


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
    `stochastic_rounding` store in few bits. On TPUs and GPUs the step of such a leaf
    runs in one kernel, which reads and writes each array once, in place. `tx` can be
    any optimizer: its update is traced, and what is not computed element by element,
    such as a global norm, is computed before the kernels. An update with effects, such
    as `jax.debug.print`, is left to XLA.

    A kernel is used in a program for one device, inside `jax.shard_map` over all axes
    of a mesh, and on sharded arrays if their types or `param_shardings` say how they
    are sharded. Elsewhere, on other platforms, and for small leaves, XLA compiles the
    step as it does `tx.update`. `OPTAX_MP_KERNELS=0` in the environment turns kernels
    off.

    Args:
        tx: any optax optimizer or chain.
        grads: the gradients.
        opt_state: its state.
        params: the params.
        param_shardings: how the params are sharded under `jit`: a tree of shardings
            like the params, or a prefix of one, such as
            `jax.tree.map(lambda p: p.sharding, params)` before `jit`. The state of a
            param must be sharded as the param is, as `tx.init` makes it.
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
    tx = as_transformation(tx, "take_step", "tx")

    # What is known while tracing stays known: a rule may use it in an `if`.
    traced = {name: x for name, x in extra_args.items() if _has_tracers(x)}
    known = {name: x for name, x in extra_args.items() if name not in traced}

    def step(given: Any, kept: Any) -> Any:
        grads, traced = given
        opt_state, params = kept
        updates, opt_state = tx.update(grads, opt_state, params, **traced, **known)
        return opt_state, optax.apply_updates(params, updates)

    given, kept = (grads, traced), (opt_state, params)
    shardings = [None] * len(jax.tree.leaves(opt_state))
    shardings += _shardings_of(params, param_shardings)
    opt_state, params = run_leafwise(step, given, kept, shardings)
    return params, opt_state


def _has_tracers(tree: Any) -> bool:
    return any(map(is_traced, jax.tree.leaves(tree)))


def _shardings_of(params: Any, shardings: Any) -> list[NamedSharding | None]:
    """Return the sharding of each leaf, None where a mesh is not known."""
    if shardings is None:
        return []
    try:
        spread = jax.tree.map(
            lambda each, part: jax.tree.map(lambda _: each, part), shardings, params
        )
    except ValueError as error:
        raise ValueError(
            "take_step: `param_shardings` has the structure "
            f"{jax.tree.structure(shardings)}, expected that of the params, which is "
            f"{jax.tree.structure(params)}, or a prefix of it; pass "
            "`jax.tree.map(lambda p: p.sharding, params)`."
        ) from error
    leaves = jax.tree.leaves(spread)
    for leaf in leaves:
        if not isinstance(leaf, Sharding):
            raise TypeError(
                f"take_step: `param_shardings` holds {leaf!r}, expected shardings, "
                "such as a `jax.sharding.NamedSharding`; pass "
                "`jax.tree.map(lambda p: p.sharding, params)`."
            )
    return [leaf if isinstance(leaf, NamedSharding) else None for leaf in leaves]
