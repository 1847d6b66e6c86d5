"""Checks that storage, state and params belong together, with the errors if not."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._arguments import check_own_state
from optax_mp._dtypes import bits
from optax_mp._leaves import Leaves, is_absent
from optax_mp._tree import describe, is_floating, is_inexact, spell
from optax_mp.masters._storage import (
    FullCopy,
    MixedPrecisionState,
    Storage,
    list_taken_dtypes,
    storage_of,
)


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
        dtypes: the dtype of each param in training, or None if it is not floating.
        has_master: whether each param will have a master.
        master_dtype: the dtype of masters.
    """
    expected = list_taken_dtypes(storage, master_dtype)
    shown = [
        f"param {spell(path)} is {describe(param)}"
        for path, param in zip(params.paths, params.values, strict=True)
    ]
    for i, dtype in enumerate(dtypes):
        if dtype is None or not has_master[i]:
            continue
        if float(jnp.finfo(dtype).min) > 0:
            raise ValueError(
                f"mixed_precision: {shown[i]}, in training {dtype}, which has neither "
                "a sign nor zero, expected a dtype of weights such as float8_e4m3fn; "
                "wrap the optimizer in `optax.masked` if this leaf, such as the scales "
                "of blocks, is not trained."
            )
        if not storage.takes(dtype, master_dtype):
            raise ValueError(
                f"mixed_precision: {shown[i]}, in training {dtype}, expected "
                f"{expected} with the storage {storage}; use `optax_mp.FullCopy()` for "
                "it."
            )
    # A float32 leaf among others is its own master. But if all leaves are, the user
    # asked for a storage that would store nothing.
    inexact = [i for i, param in enumerate(params.values) if is_inexact(param)]
    if inexact and not any(has_master) and storage != FullCopy():
        raise ValueError(
            f"mixed_precision: the storage {storage} needs params of {expected}, found "
            f"none ({shown[inexact[0]]}). Cast the params with "
            "`optax_mp.cast_floating`, or pass `param_dtype` if you cast them later; "
            "params that stay as they are need no storage."
        )


def check_state(state: Any, storage: Storage) -> None:
    """Raise unless a state was made by `mixed_precision` with this storage."""
    # Any subclass, because each storage has one.
    check_own_state(state, MixedPrecisionState, "mixed_precision")
    # By value: equal storages make states of the same type.
    if storage_of(state, "mixed_precision") != storage:
        raise ValueError(
            f"mixed_precision: the state was made with the storage {state.storage}, "
            f"expected {storage}, that of this transform; convert it with "
            "`optax_mp.convert_opt_state`."
        )


def check_param(
    where: str,
    param: Any,
    stored: Any,
    master_dtype: jnp.dtype,
    declared: jnp.dtype | None,
    storage: Storage,
) -> None:
    """Raise unless `param` has the dtype and shape that the state was made for.

    `where` names the param.
    """
    where = f"mixed_precision: param {where} is {describe(param)}"
    is_narrow = is_floating(param) and bits(param.dtype) < bits(master_dtype)
    # First, because a param that was not cast as declared fails the others as well.
    if is_floating(param) and declared != param.dtype:
        raise ValueError(
            f"{where}, expected {declared} as `param_dtype` says; cast the params with "
            "`Policy.cast_to_param` or `optax_mp.cast_floating` before training. If "
            f"they were cast, {_explain_promotion(storage)}"
        )
    if is_absent(stored):
        # It was its own master. Trained in this dtype it would lose small updates.
        if is_narrow:
            raise ValueError(
                f"{where}, and the state holds no master for it: at `init` it was not "
                f"floating or was as wide as {master_dtype.name}. Call `init` with "
                "params in the dtype they are trained in, or say which it will be with "
                "`param_dtype`."
            )
        return
    # It would now be its own master, beside the one that the state has.
    if is_floating(param) and not is_narrow:
        raise ValueError(
            f"{where}, expected a dtype narrower than its {master_dtype.name} master: "
            f"it was at `init`, and {_explain_promotion(storage)}"
        )
    # Only the last axes, because a storage may add leading ones.
    leaves = jax.tree.leaves(stored)
    if not is_floating(param) or any(
        x.shape[x.ndim - param.ndim :] != param.shape for x in leaves
    ):
        shown = " and ".join(map(describe, leaves))
        raise ValueError(
            f"{where}, but its master is {shown}, expected a floating array of the "
            "same shape: the state belongs to other params; call `init` again."
        )


def check_master(
    where: str, master: Any, master_dtype: jnp.dtype, storage: Storage
) -> None:
    """Raise unless the decoded master of the param `where` has the expected dtype."""
    # The type of the state does not say the `master_dtype`, so decode a master.
    if master.dtype != master_dtype:
        raise ValueError(
            f"mixed_precision: the state keeps {describe(master)} as the master of "
            f"param {where}, expected {master_dtype} with the storage {storage}: the "
            "state was made with another `master_dtype`; convert it with "
            "`optax_mp.convert_opt_state`."
        )


def _explain_promotion(storage: Storage) -> str:
    """Return what may have made a param wider, and how to fix it."""
    # With `Split` updates are float32 whatever `update_dtype` is.
    remedy = 'build the transform with `update_dtype="params"`'
    if storage.param_is_part:
        remedy = "use `optax.apply_updates`, which does"
    return (
        "something promoted it since. If `equinox.apply_updates` did, which adds "
        f"float32 updates without casting back, {remedy}; else cast the params back "
        "with `optax_mp.cast_floating`."
    )
