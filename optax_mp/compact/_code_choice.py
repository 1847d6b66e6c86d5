"""Which arrays of a state are quantized, and with which codes.

All of it is found at `init` by tracing the optimizer's own `init` and `update`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._jax._dependence import depending_outputs
from optax_mp._jax._traced import TracedCall, is_dynamic
from optax_mp._tree import is_floating
from optax_mp.compact._code_format import CodeFormat
from optax_mp.compact._full_precision import check_without_update, in_full_precision
from optax_mp.compact._signs import nonnegative_outputs
from optax_mp.compact._traced_update import TracedUpdate, trace_update


def choose_codes(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    code_format: CodeFormat,
    min_size: int,
) -> list[jnp.dtype | None]:
    """Return the dtype of codes for each leaf of `inner`'s state; None to leave it."""
    start, update = (
        TracedCall.of(inner.init, params),
        trace_update(inner, params, state),
    )
    leaves = jax.tree.leaves(state)
    large = [_is_large(leaf, min_size) for leaf in leaves if is_dynamic(leaf)]
    # Masters, averages and other copies of the params are no moments.
    chosen = _and_not(large, depending_outputs(start.closed))
    if isinstance(update, TracedUpdate):
        chosen = _and_not(chosen, in_full_precision(start, update))
    elif any(chosen):
        check_without_update(start, large, state, params, update)
    codes = iter(
        (code_format.unsigned if never_negative else code_format.signed)
        if is_chosen
        else None
        for is_chosen, never_negative in zip(
            chosen, _never_negative(start, update), strict=True
        )
    )
    return [next(codes) if is_dynamic(leaf) else None for leaf in leaves]


def _and_not(claims: list[bool], others: list[bool]) -> list[bool]:
    return [a and not b for a, b in zip(claims, others, strict=True)]


def _is_large(leaf: Any, min_size: int) -> bool:
    if not is_floating(leaf) or leaf.size < min_size or not leaf.ndim:
        return False
    # Dequantized values are float32, and `inner` may expect the dtype that it made.
    return leaf.dtype == jnp.float32


def _never_negative(start: TracedCall, update: TracedUpdate | Exception) -> list[bool]:
    """Return for each array of a state whether its values never are negative."""
    known = nonnegative_outputs(start.closed, [False] * len(start.arrays))
    if isinstance(update, Exception) or not update.is_exact:
        return [False] * len(known)  # signed codes serve as well
    others = [False] * update.param_count
    while True:
        after = nonnegative_outputs(update.closed, [*others, *known, *others])
        _, after = update.split_outputs(after)
        still = [a and b for a, b in zip(known, after, strict=True)]
        if still == known:
            return known
        known = still
