"""What is added to a param: in a step, in a skipped step, and without an update."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp.core._dtypes import is_inexact
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._jaxpr import is_dynamic
from optax_mp.core.trees._leaves import ABSENT
from optax_mp.core.trees._tree import PyTree

# Whether to take a step: bool `[]`, or a plain bool.
Choice = jax.Array | bool


def difference(target: jax.Array, start: jax.Array) -> jax.Array:
    """Return what to add to `start` for it to become `target`, in their common dtype.

    An infinite `start` stays: what to add is 0, because no sum would make it finite. If
    `target` is NaN, so is the difference. To NaN anything may be added.

    Args:
        target: floating `[...]`.
        start: `[...]`, in the same dtype.
    """
    change = lax.sub(target, start)
    # inf - inf would be NaN. Not by a clamp, which takes a CPU a fifth of a step.
    moves = lax.bitwise_or(lax.is_finite(start), lax.ne(target, target))
    # XLA would merge an array of zeros with the one that a loop begins with to sum
    # gradients, and so keep that one beside the sums: 4 bytes per weight.
    zero = lax.convert_element_type(moves, change.dtype)  # where it is read
    return lax.select(moves, change, zero)


def select(proceed: Choice, new: Any, old: Any) -> jax.Array:
    """Return the new value `[...]` if a step is taken, else the old one.

    It has the dtype of the new value.
    """
    # Some optimizers widen their state at the first step.
    if new.dtype != old.dtype:
        old = old.astype(new.dtype)
    return lax.select(proceed, new, old)


def or_negative_zeros(proceed: Choice, value: Any) -> Any:
    """Return an update, or negative zeros if the step is skipped.

    Adding negative zero changes no param, not even one of -0.0. Integers have only one
    zero. Leaves that are not numbers are always returned unchanged.
    """
    if isinstance(value, int | float | complex):
        value = jnp.asarray(value)
    if not (is_dynamic(value) and jnp.issubdtype(value.dtype, jnp.number)):
        return value
    is_complex = jnp.issubdtype(value.dtype, jnp.complexfloating)
    zero = complex(-0.0, -0.0) if is_complex else -0.0
    return select(proceed, value, lax.full_like(value, zero))


def or_no_change(update: Any, param: Any) -> Any:
    """Return an update; zeros `[...]` like the param if it is None or float0.

    None and float0 cannot be added to an array. So params that are not differentiated,
    or are frozen by a gradient of None, pass through `optax.apply_updates`.
    """
    if update is not None and getattr(update, "dtype", None) != jax.dtypes.float0:
        return update
    kinds = jnp.number, jnp.bool_
    if not (
        _arrays.is_array(param) and any(jnp.issubdtype(param.dtype, x) for x in kinds)
    ):
        return update
    # Negative, because 0.0 would change a param of -0.0. Integers have one zero only.
    return jnp.full(param.shape, -0.0 if is_inexact(param) else 0, param.dtype)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Return what `optax.apply_updates` does; a param whose update is None stays."""

    def apply(param: Any, update: Any) -> Any:
        update = or_no_change(update, param)
        if isinstance(update, ABSENT):
            return param
        return optax.apply_updates(param, update)

    # It adds float32 updates to 16-bit params, and casts back.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(apply, params, updates, is_leaf=lambda x: x is None)


def choose_if_on_host(proceed: Choice, new: Any, old: Any) -> Any:
    """Return the chosen leaf of a state if it is in host memory, else the new one."""
    if not _arrays.is_on_host(old):
        return new
    new = _arrays.to_device(new) if _arrays.is_on_host(new) else new
    return _arrays.to_host(select(proceed, new, _arrays.to_device(old)))
