"""Checks that storage, state and params belong together, with the errors if not."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._arguments import check_own_state
from optax_mp._dtypes import bits
from optax_mp._leaves import Leaves, is_absent
from optax_mp._tree import describe, ends_in, is_floating, is_inexact, spell
from optax_mp.masters._storage import (
    FullCopy,
    MixedPrecisionState,
    Storage,
    list_taken_dtypes,
    storage_of,
)


def check_storable(
    storage: Storage, where: str, dtype: jnp.dtype, master_dtype: jnp.dtype
) -> None:
    """Raise unless `storage` can keep the master of a param.

    Args:
        storage: a storage.
        where: the param in words.
        dtype: its dtype in training.
        master_dtype: the dtype of masters.
    """
    if float(jnp.finfo(dtype).min) > 0:
        raise ValueError(
            f"mixed_precision: {where}, in training {dtype}, which has neither a sign "
            "nor zero, expected a dtype of weights such as float8_e4m3fn; wrap the "
            "optimizer in `optax.masked` if this leaf, such as the scales of blocks, "
            "is not trained."
        )
    if not storage.takes(dtype, master_dtype):
        raise ValueError(
            f"mixed_precision: {where}, in training {dtype}, expected "
            f"{list_taken_dtypes(storage, master_dtype)} with the storage {storage}; "
            "use `optax_mp.FullCopy()` for it."
        )


def check_any_stored(
    storage: Storage, params: Leaves, stored: Sequence[Any], master_dtype: jnp.dtype
) -> None:
    """Raise if a storage other than full copies would store nothing.

    A float32 leaf among others is its own master. But if all leaves are, the user
    asked for a storage in vain.
    """
    inexact = [i for i, param in enumerate(params.values) if is_inexact(param)]
    if inexact and all(map(is_absent, stored)) and storage != FullCopy():
        path, param = params.paths[inexact[0]], params.values[inexact[0]]
        raise ValueError(
            f"mixed_precision: the storage {storage} needs params of "
            f"{list_taken_dtypes(storage, master_dtype)}, found none (param "
            f"{spell(path)} is {describe(param)}). Cast the params with "
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
    # First, because a param that was not cast as declared fails the others as well.
    if is_floating(param) and declared != param.dtype:
        raise ValueError(
            f"{where}, expected {declared} as `param_dtype` says; cast the params with "
            "`Policy.cast_to_param` or `optax_mp.cast_floating` before training. If "
            f"they were cast, {_explain_promotion(storage)}"
        )
    is_wide = is_floating(param) and bits(param.dtype) >= bits(master_dtype)
    if is_absent(stored):
        # It was its own master. Trained in this dtype it would lose small updates.
        if is_floating(param) and not is_wide:
            raise ValueError(
                f"{where}, and the state holds no master for it: at `init` it was not "
                f"floating or was as wide as {master_dtype.name}. Call `init` with "
                "params in the dtype they are trained in, or say which it will be with "
                "`param_dtype`."
            )
        return
    # It would now be its own master, beside the one that the state has.
    if is_wide:
        raise ValueError(
            f"{where}, expected a dtype narrower than its {master_dtype.name} master: "
            f"it was at `init`, and {_explain_promotion(storage)}"
        )
    check_shape(where, param, stored)


def check_shape(where: str, param: Any, stored: Any) -> None:
    """Raise unless what is stored can be the master of a param."""
    leaves = jax.tree.leaves(stored)
    # A storage may add leading axes.
    if not is_floating(param) or not all(ends_in(x, param.shape) for x in leaves):
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
