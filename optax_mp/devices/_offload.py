"""Keep the large arrays of an optimizer's state in the memory of the host."""

from typing import Any

import jax
import optax

from optax_mp._inner import as_transformation
from optax_mp._jax._memory import is_on_host, to_host
from optax_mp.leafwise._from_host import Limits, run_from_host


def offload(inner, *, memory_kind="pinned_host", chunk_bytes=2**26, min_size=2**16):
    inner = as_transformation(inner, "offload")
    limits = Limits(min_size, chunk_bytes)

    def init_fn(params):
        state = inner.init(params)
        return jax.tree.map(lambda x: to_host(x) if x.size >= min_size else x, state)

    def update_fn(updates, state, params=None, **extra):
        def step(given, kept):
            grads, params = given
            return inner.update(grads, kept, params, **extra)

        return run_from_host(step, (updates, params), state, limits)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
