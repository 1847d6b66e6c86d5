"""Errors for params and gradients that are not what they were at `init`."""

from typing import Any

import jax.numpy as jnp

from optax_mp._dtypes import bits
from optax_mp._leaves import is_absent
from optax_mp._tree import describe, is_floating, is_inexact, place
from optax_mp.masters.storage._contract import FullCopy, Storage, storage_of


def _promoted(storage: Storage) -> str:
    """Return what may have made a param wider, and what to do about it."""
    if isinstance(storage, FullCopy):
        remedy = 'build the transform with `update_dtype="params"`'
    else:
        remedy = "use `optax.apply_updates`, which does"
    return (
        "something promoted it since. If `equinox.apply_updates` did, which adds "
        f"float32 updates without casting back, {remedy}; else cast the params back "
        "with `optax_mp.cast_floating`."
    )


def check_param(
    path: tuple[Any, ...],
    param: Any,
    kept: Any,
    master_dtype: jnp.dtype,
    declared: jnp.dtype | None,
    storage: Storage,
) -> None:
    """Raise unless `param` is still what it was, by what the state keeps for it."""
    where = f"mixed_precision: param {place(path)} is {describe(param)}"
    narrow = is_floating(param) and bits(param.dtype) < bits(master_dtype)
    if is_floating(param) and declared != param.dtype:
        raise ValueError(
            f"{where}, expected {declared} as `param_dtype` says; cast the params with "
            "`Policy.cast_to_param` or `optax_mp.cast_floating` before training. If "
            f"they were cast, {_promoted(storage)}"
        )
    if not is_absent(kept) and not is_floating(param):
        raise ValueError(
            f"{where}, but has a {master_dtype.name} master since `init`, expected a "
            "floating array: the state belongs to other params; call `init` again."
        )
    if not is_absent(kept) and not narrow:
        raise ValueError(
            f"{where}, expected a floating dtype narrower than its {master_dtype.name} "
            f"master: it was at `init`, and {_promoted(storage)}"
        )
    if is_absent(kept) and narrow:
        raise ValueError(
            f"{where}, and the state holds no master for it: at `init` it was not "
            f"floating or was as wide as {master_dtype.name}. Call `init` with params "
            "in the dtype they are trained in, or say which it will be with "
            "`param_dtype`."
        )
    if not is_absent(kept) and kept.dtype != storage.dtype(master_dtype):
        raise ValueError(
            f"mixed_precision: the state keeps {describe(kept)} as the master of param "
            f"{place(path)}, expected {storage.dtype(master_dtype)} with the storage "
            f"{storage}: the state was made with {storage_of(kept)}, or with another "
            "`master_dtype`; convert it with `optax_mp.convert_opt_state`."
        )
    if not is_absent(kept) and kept.shape != param.shape:
        raise ValueError(
            f"{where}, but its master is {describe(kept)}, expected the same shape: "
            "the state belongs to other params; call `init` again."
        )


def check_gradient(
    path: tuple[Any, ...], param: Any, grad: Any, caller: str = "mixed_precision"
) -> None:
    """Raise unless `grad` can be a gradient of `param`."""
    if is_absent(grad):
        return
    where = f"{caller}: the gradient of {place(path)} is {describe(grad)}"
    if not is_inexact(param):
        if is_inexact(grad):
            raise TypeError(
                f"{where}, but the param is {describe(param)}, which cannot be "
                "trained; expected None or the float0 gradient that "
                "`jax.grad(..., allow_int=True)` gives; make the param a floating "
                "array, or its gradient None."
            )
        return
    if not is_inexact(grad):
        raise TypeError(
            f"{where}, expected a floating gradient for the param {describe(param)}; "
            "leave leaves that are not trained out with `optax.masked`."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
        raise TypeError(
            f"{where}, expected a real gradient for the param {describe(param)}; take "
            "its real part."
        )
    # Per-example gradients have leading axes, which `inner` is to reduce.
    shape = jnp.shape(grad)
    if shape[len(shape) - jnp.ndim(param) :] != jnp.shape(param):
        raise ValueError(f"{where}, expected the shape of the param {describe(param)}.")


def check_step(
    path: tuple[Any, ...],
    param: Any,
    grad: Any,
    step: Any,
    caller: str = "mixed_precision",
) -> None:
    """Raise unless `inner` made an update of the param's shape from the gradient."""
    if jnp.shape(step) != jnp.shape(param):
        raise ValueError(
            f"{caller}: the gradient of {place(path)} is {describe(grad)}, of "
            f"which `inner` made the update {describe(step)}; expected the shape of "
            f"the param {describe(param)}."
        )
