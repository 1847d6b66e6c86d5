"""Which arrays of a state are quantized, and with which codes.

`low_bit_state` decides this at `init`, by tracing the optimizer's own `init` and
`update`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._jax._dependence import depending_outputs
from optax_mp._jax._traced import TracedCall, is_dynamic
from optax_mp._quantized import Code
from optax_mp._tree import is_floating
from optax_mp.compact._code_format import CodeFormat
from optax_mp.compact._full_precision import (
    check_without_update,
    need_full_precision,
    reach_products,
)
from optax_mp.compact._signs import nonnegative_states
from optax_mp.compact._traced_update import TracedUpdate, trace_update


def choose_codes(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    code_format: CodeFormat,
    min_size: int,
) -> list[Code | None]:
    """Return how to quantize each leaf of `inner`'s state; None to leave it."""
    init = TracedCall.of(inner.init, params)
    update = trace_update(inner, params, state)
    leaves = jax.tree.leaves(state)
    # Only these are outputs of `init`, and the lists below have an entry for each.
    arrays = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
    large = [_is_large(leaves[i], min_size) for i in arrays]
    # Masters, averages and other arrays that start as the params are not moments.
    chosen = _without(large, depending_outputs(init.closed))
    in_product = [False] * len(arrays)
    if isinstance(update, TracedUpdate):
        chosen = _without(chosen, need_full_precision(init, update))
        in_product = reach_products(update)
    elif any(chosen):
        check_without_update(init, large, state, params, update)
    codes: list[Code | None] = [None] * len(leaves)
    never_negative = _never_negative(init, update)
    for at, i in enumerate(arrays):
        if chosen[at]:
            codes[i] = code_format.code(
                leaves[i].shape,
                is_unsigned=never_negative[at],
                is_in_product=in_product[at],
            )
    return codes


def _without(chosen: list[bool], excluded: list[bool]) -> list[bool]:
    return [a and not b for a, b in zip(chosen, excluded, strict=True)]


def _is_large(leaf: Any, min_size: int) -> bool:
    if not is_floating(leaf) or leaf.size < min_size or not leaf.ndim:
        return False
    # Dequantized values are float32, and `inner` may expect the dtype that it made.
    return leaf.dtype == jnp.float32


def _never_negative(init: TracedCall, update: TracedUpdate | Exception) -> list[bool]:
    """Return for each array of a state whether its values are never negative."""
    if isinstance(update, Exception) or not update.is_exact:
        return [False] * len(init.closed.out_avals)  # signed codes can hold any values
    count = update.param_count  # gradients and params
    return nonnegative_states(init.closed, update.closed, count, count)
