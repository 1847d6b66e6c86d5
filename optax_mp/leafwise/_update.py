"""The update of a transformation of this package, in one pass over memory."""

import functools
from typing import Any

import jax
import optax

from optax_mp._jax import _by_platform
from optax_mp._jax._apart import can_call_apart
from optax_mp._jax._arrays import split_traced
from optax_mp._jax._by_platform import kernel_obstacle
from optax_mp.leafwise._engine import run_leafwise


def leafwise_update(update: optax.TransformUpdateExtraArgsFn) -> Any:
    """Return the update of a transformation, in one pass where that is less traffic.

    The param that follows from it is computed elsewhere, in one more pass. So kernels
    are worth it on a TPU only, where XLA alone passes over what is packed several
    times. On a CPU small leaves are taken together, and large ones in turn. To trace a
    step twice takes time, so it is not done where nothing is for either.
    """

    @functools.wraps(update)
    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        pays = kernel_obstacle() is None and (
            _by_platform.may_compile_for_tpus()
            or (can_call_apart() and _by_platform.compiles_for_cpus())
        )
        # A function, as for a line search, may change what is around it.
        if not pays or any(map(callable, jax.tree.leaves(extra_args))):
            return update(updates, state, params, **extra_args)
        traced, known = split_traced(extra_args)

        def step(given: Any, kept: Any) -> tuple[Any, Any]:
            updates, params, traced = given
            return update(updates, kept, params, **traced, **known)

        given = updates, params, traced
        return run_leafwise(step, given, state, platforms=("tpu", "cpu"))

    return update_fn
