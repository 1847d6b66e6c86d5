"""Errors for what does not belong together: storage, state, params and gradients."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._dtypes import bits
from optax_mp._leaves import Leaves, is_absent
from optax_mp._tree import describe, is_floating, is_inexact, spell
from optax_mp.masters._state import MixedPrecisionState, check_storage_known
from optax_mp.masters.storage import FullCopy, Storage
from optax_mp.masters.storage._contract import dtypes_taken


def check_storable(
    storage: Storage,
    params: Leaves,
    dtypes: Sequence[jnp.dtype | None],
    has_master: Sequence[bool],
    master_dtype: jnp.dtype,
) -> None:
    """Raise unless `storage` can keep the masters of these params.

    Args:
        storage: a storage.
        params: the params given to `init`.
        dtypes: the dtype of each in training, or None where it is not floating.
        has_master: whether each is to have a master.
        master_dtype: of the masters.
    """
    taken = dtypes_taken(storage, master_dtype)
    for path, param, dtype, stores in zip(
        params.paths, params.values, dtypes, has_master, strict=True
    ):
        if stores and dtype is not None and not storage.takes(dtype, master_dtype):
            raise ValueError(
                f"mixed_precision: param {spell(path)} is {describe(param)}, in "
                f"training {dtype}, expected {taken} with the storage {storage}; use "
                "`optax_mp.FullCopy()` for it."
            )
    # One float32 leaf among others is its own master. If all are, a storage that was
    # asked for stores nothing.
    inexact = [i for i, param in enumerate(params.values) if is_inexact(param)]
    if inexact and not any(has_master) and storage != FullCopy():
        path, param = params.paths[inexact[0]], params.values[inexact[0]]
        raise ValueError(
            f"mixed_precision: the storage {storage} needs params of {taken}, found "
            f"none (param {spell(path)} is {describe(param)}). Cast the params with "
            "`optax_mp.cast_floating`, or pass `param_dtype` if you cast them later; "
            "params that stay as they are need no storage."
        )


def check_state(state: Any, storage: Storage) -> None:
    """Raise unless a state was made by `mixed_precision` with this storage."""
    if not isinstance(state, MixedPrecisionState):
        raise TypeError(
            f"mixed_precision: `state` is a {type(state).__name__}, expected the "
            "MixedPrecisionState that `init` of this transform returns."
        )
    if check_storage_known(state, "mixed_precision") != storage:
        raise ValueError(
            f"mixed_precision: the state was made with the storage {state.storage}, "
            f"expected {storage}, that of this transform; convert it with "
            "`optax_mp.convert_opt_state`."
        )


def check_param(
    path: tuple[Any, ...],
    param: Any,
    stored: Any,
    master_dtype: jnp.dtype,
    declared: jnp.dtype | None,
    storage: Storage,
) -> None:
    """Raise unless `param` is still what it was, by what the state stores for it."""

    def it() -> str:  # written only for an error
        return f"mixed_precision: param {spell(path)} is {describe(param)}"

    is_narrow = is_floating(param) and bits(param.dtype) < bits(master_dtype)
    if is_floating(param) and declared != param.dtype:
        raise ValueError(
            f"{it()}, expected {declared} as `param_dtype` says; cast the params with "
            "`Policy.cast_to_param` or `optax_mp.cast_floating` before training. If "
            f"they were cast, {_explain_promotion(storage)}"
        )
    if is_absent(stored) and is_narrow:
        raise ValueError(
            f"{it()}, and the state holds no master for it: at `init` it was not "
            f"floating or was as wide as {master_dtype.name}. Call `init` with params "
            "in the dtype they are trained in, or say which it will be with "
            "`param_dtype`."
        )
    if is_absent(stored):
        return
    if not is_floating(param):
        raise ValueError(
            f"{it()}, but has a {master_dtype.name} master since `init`, expected a "
            "floating array: the state belongs to other params; call `init` again."
        )
    if not is_narrow:
        raise ValueError(
            f"{it()}, expected a dtype narrower than its {master_dtype.name} master: "
            f"it was at `init`, and {_explain_promotion(storage)}"
        )
    for leaf in jax.tree.leaves(stored):
        if leaf.shape[leaf.ndim - param.ndim :] != param.shape:
            raise ValueError(
                f"{it()}, but its master is {describe(leaf)}, expected the same "
                "shape: the state belongs to other params; call `init` again."
            )


def check_master(
    path: tuple[Any, ...], param: Any, master: Any, wanted: jnp.dtype, storage: Storage
) -> None:
    """Raise unless what a storage gives back can be the master of a param."""
    if master.dtype != wanted:
        raise ValueError(
            f"mixed_precision: the state keeps {describe(master)} as the master of "
            f"param {spell(path)}, expected {wanted} with the storage {storage}: the "
            "state was made with another `master_dtype`; convert it with "
            "`optax_mp.convert_opt_state`."
        )
    if master.shape != param.shape:
        raise ValueError(
            f"mixed_precision: the storage {storage} keeps {describe(master)} as the "
            f"master of param {spell(path)}, expected the shape of the param "
            f"{describe(param)}."
        )


def _explain_promotion(storage: Storage) -> str:
    """Return what may have made a param wider, and what to do about it."""
    remedy = 'build the transform with `update_dtype="params"`'
    if storage.param_is_part:
        remedy = "use `optax.apply_updates`, which does"
    return (
        "something promoted it since. If `equinox.apply_updates` did, which adds "
        f"float32 updates without casting back, {remedy}; else cast the params back "
        "with `optax_mp.cast_floating`."
    )


def check_gradient(
    path: tuple[Any, ...], param: Any, grad: Any, caller: str = "mixed_precision"
) -> None:
    """Raise unless `grad` can be a gradient of `param`."""
    if is_absent(grad):
        return

    def it() -> str:  # written only for an error
        return f"{caller}: the gradient of {spell(path)} is {describe(grad)}"

    if not is_inexact(param):
        if is_inexact(grad):
            raise TypeError(
                f"{it()}, but the param is {describe(param)}, which cannot be "
                "trained; expected None or the float0 gradient that "
                "`jax.grad(..., allow_int=True)` gives; make the param a floating "
                "array, or its gradient None."
            )
        return
    if not is_inexact(grad):
        raise TypeError(
            f"{it()}, expected a floating gradient for the param {describe(param)}; "
            "leave leaves that are not trained out with `optax.masked`."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
        raise TypeError(
            f"{it()}, expected a real gradient for the param {describe(param)}; take "
            "its real part."
        )
    # Per-example gradients have leading axes, which `inner` is to reduce.
    shape = jnp.shape(grad)
    if shape[len(shape) - jnp.ndim(param) :] != jnp.shape(param):
        raise ValueError(f"{it()}, expected the shape of the param {describe(param)}.")


def check_update(
    path: tuple[Any, ...],
    param: Any,
    grad: Any,
    update: Any,
    caller: str = "mixed_precision",
) -> None:
    """Raise unless `inner` made an update of the param's shape from a gradient."""
    if jnp.shape(update) != jnp.shape(param):
        raise ValueError(
            f"{caller}: the gradient of {spell(path)} is {describe(grad)}, of "
            f"which `inner` made the update {describe(update)}; expected the shape of "
            f"the param {describe(param)}."
        )
