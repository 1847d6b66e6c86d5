"""The update of a transformation of this package, in one pass over memory."""

import functools
from typing import Any

import jax
import optax

from optax_mp.leafwise._engine import run_step


def leafwise_update(update: optax.TransformUpdateExtraArgsFn) -> Any:
    """Return the update of a transformation, in one pass where that is less traffic.

    The new param is computed outside, in one more pass. So kernels pay on a TPU only,
    where XLA alone passes over packed arrays several times.
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
        result, _ = run_step(step, inputs, state, platforms=("tpu",))
        return result

    return update_fn
