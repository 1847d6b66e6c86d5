"""The settings of `mixed_precision`, and whether a state and params fit to them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp._dtypes import bits, check_available, floating_dtype
from optax_mp._policy import DTypeRule, read_param_dtype
from optax_mp.masters._storage import Storage, check_storage
from optax_mp.trees._leaves import is_absent
from optax_mp.trees._tree import describe, ends_in, is_floating, spell

# What may have made a param wider, and how to fix it.
_PROMOTED = (
    "something promoted it since. If `equinox.apply_updates` did, which adds float32 "
    "updates without casting back, use `optax.apply_updates`, or "
    '`update_dtype="params"` with `optax_mp.FullCopy()`; otherwise cast it back.'
)


class Settings(NamedTuple):
    """The arguments of `mixed_precision`, checked.

    Attributes:
        master_dtype: the dtype of masters.
        dtype_in_training: the dtype of each param in training, as the user declares it.
        update_dtype: the dtype of updates; `"params"`, or None for the gradients'.
        storage: how masters are kept.
        is_declared: whether the user declares dtypes in training.
    """

    master_dtype: jnp.dtype
    dtype_in_training: DTypeRule
    update_dtype: jnp.dtype | str | None
    storage: Storage
    is_declared: bool

    @classmethod
    def of(
        cls, master_dtype: Any, param_dtype: Any, update_dtype: Any, storage: Any
    ) -> "Settings":
        """Return the settings of `mixed_precision`, or raise."""
        master_dtype = floating_dtype(master_dtype, "mixed_precision: `master_dtype`")
        by_leaf = read_param_dtype(param_dtype, "mixed_precision: `param_dtype`")
        # `isinstance` first, because `dtype == "params"` tries to read a dtype's name.
        is_params = isinstance(update_dtype, str) and update_dtype == "params"
        if update_dtype is not None and not is_params:
            argument = 'mixed_precision: `update_dtype`, if not None or "params",'
            update_dtype = floating_dtype(update_dtype, argument)
        check_storage(storage, master_dtype, update_dtype)
        is_declared = param_dtype is not None
        return cls(master_dtype, by_leaf, update_dtype, storage, is_declared)

    def check_dtypes(self) -> None:
        """Raise if JAX does not have a dtype, as float64 without 64-bit types."""
        # At each call, because users may turn 64-bit types on after construction.
        for name in ("master_dtype", "update_dtype"):
            dtype = getattr(self, name)
            if isinstance(dtype, np.dtype) and dtype.itemsize > 4:
                check_available(dtype, f"mixed_precision: `{name}`")

    def check_param(self, path: tuple[Any, ...], param: Any, stored: Any) -> None:
        """Raise unless `param` has the dtype and shape that the state was made for."""
        # The usual case: a narrow param, its master, and no dtype declared.
        if is_floating(param) and not self.is_declared:
            is_like = getattr(stored, "shape", None) == param.shape
            if is_like and bits(param.dtype) < bits(self.master_dtype):
                return
        declared = self.dtype_in_training(path, param)
        where = f"mixed_precision: expected param {spell(path)}"
        is_wide = is_floating(param) and bits(param.dtype) >= bits(self.master_dtype)
        # First, because a param that was not cast as declared fails the others as well.
        if is_floating(param) and declared != param.dtype:
            raise ValueError(
                f"{where} in {declared}, as `param_dtype` says, got {describe(param)}; "
                "cast the params with `Policy.cast_to_param` before training, and make "
                f"a Python number an array. If they were cast, {_PROMOTED}"
            )
        # It was its own master. Trained in this dtype it would lose small updates.
        if is_absent(stored) and is_floating(param) and not is_wide:
            raise ValueError(
                f"{where} as at `init`, got {describe(param)}, for which the "
                "state holds no master; call `init` with params in the dtype they "
                "are trained in, or say which it will be with `param_dtype`."
            )
        # It would now be its own master, beside the one that the state has.
        if is_wide and not is_absent(stored):
            raise ValueError(
                f"{where} in a dtype narrower than its {self.master_dtype.name} "
                f"master, as at `init`, got {describe(param)}; {_PROMOTED}"
            )
        if not is_absent(stored):
            check_shape(where, param, stored, self.storage)

    def check_master(self, path: tuple[Any, ...], master: Any) -> None:
        """Raise unless the decoded master of a param has the expected dtype."""
        # The type of the state does not say the `master_dtype`, so decode a master.
        if master.dtype != self.master_dtype:
            raise ValueError(
                f"mixed_precision: expected the master of param {spell(path)} in "
                f"{self.master_dtype}, got {describe(master)}, of a state with another "
                "`master_dtype`; convert it with `optax_mp.convert_opt_state`."
            )


def check_shape(where: str, param: Any, stored: Any, storage: Storage) -> None:
    """Raise unless what is stored can be the master of a param."""
    leaves = jax.tree.leaves(stored)
    if is_floating(param) and all(x.shape == param.shape for x in leaves):
        return
    # A storage may add leading axes.
    fits = is_floating(param) and all(ends_in(x, param.shape) for x in leaves)
    if not fits or _shape_of_master(storage, stored, param) != param.shape:
        shown = " and ".join(map(describe, leaves))
        raise ValueError(
            f"{where} to be a floating array of the shape of its master {shown}, got "
            f"{describe(param)}; the state belongs to other params: call `init` again."
        )


def _shape_of_master(storage: Storage, stored: Any, param: Any) -> Any:
    """Return the shape of a decoded master; None if it cannot be decoded."""
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (stored, param)
    )
    try:
        return jax.eval_shape(storage.decode, *args).shape
    except (TypeError, ValueError):
        return None
