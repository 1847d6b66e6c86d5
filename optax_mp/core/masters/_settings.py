"""The settings of `mixed_precision`, and whether a state and params fit them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_mp.core import _dtypes
from optax_mp.core._policy import DTypeRule, read_param_dtype
from optax_mp.core.jax_api import _arrays
from optax_mp.core.masters._storage import Storage, check_storage
from optax_mp.core.trees import _tree
from optax_mp.core.trees._leaves import Leaves, is_absent

CALLER = "mixed_precision"
# What may have made a param wider, and how to fix it.
_PROMOTED = (
    "If `equinox.apply_updates` promoted it, use `optax.apply_updates`, or "
    '`update_dtype="params"`.'
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
        master_dtype = _dtypes.floating_dtype(
            master_dtype, "mixed_precision: `master_dtype`"
        )
        by_leaf = read_param_dtype(param_dtype, "mixed_precision: `param_dtype`")
        # `isinstance` first, because `dtype == "params"` tries to read a dtype's name.
        is_params = isinstance(update_dtype, str) and update_dtype == "params"
        if update_dtype is not None and not is_params:
            argument = 'mixed_precision: `update_dtype`, if not None or "params",'
            update_dtype = _dtypes.floating_dtype(update_dtype, argument)
        check_storage(storage, master_dtype, update_dtype)
        is_declared = param_dtype is not None
        return cls(master_dtype, by_leaf, update_dtype, storage, is_declared)

    def check_dtypes(self) -> None:
        """Raise if JAX does not have a dtype, as float64 without 64-bit types."""
        # At each call, because users may turn 64-bit types on after construction.
        for name in ("master_dtype", "update_dtype"):
            dtype = getattr(self, name)
            if isinstance(dtype, np.dtype) and dtype.itemsize > 4:
                _dtypes.check_available(dtype, f"mixed_precision: `{name}`")

    def check_masters(self, params: Leaves, stored: Sequence[Any]) -> None:
        """Raise if no 16-bit param has a master, because masters are as narrow.

        It is called at `init` and in each step, because the params may be cast in
        between.

        Args:
            params: the params.
            stored: what is stored for each, `MaskedNode()` if nothing is.
        """
        if _dtypes.bits(self.master_dtype) > 16 or not all(map(is_absent, stored)):
            return
        for path, leaf in zip(params.paths, params.values, strict=True):
            dtype = self.dtype_in_training(path, leaf)
            if dtype is not None and _dtypes.bits(dtype) <= 16:
                raise ValueError(
                    "mixed_precision: expected `master_dtype`, the second argument, "
                    f"to be wider than the params, got {self.master_dtype} for "
                    f"{_tree.spell(path)} in {dtype}; leave it out, or pass "
                    f"`param_dtype=jnp.{dtype}`."
                )

    def check_param(self, path: tuple[Any, ...], param: Any, stored: Any) -> None:
        """Raise unless `param` has the dtype and shape that the state was made for."""
        # The usual case: a narrow param, its master, and no dtype declared.
        if _dtypes.is_floating(param) and not self.is_declared:
            is_like = getattr(stored, "shape", None) == param.shape
            if is_like and _dtypes.bits(param.dtype) < _dtypes.bits(self.master_dtype):
                return
        declared = self.dtype_in_training(path, param)
        where = f"mixed_precision: expected param {_tree.spell(path)}"
        is_wide = _dtypes.is_floating(param) and _dtypes.bits(
            param.dtype
        ) >= _dtypes.bits(self.master_dtype)
        # First, because a param that was not cast as declared fails the others as well.
        if _dtypes.is_floating(param) and declared != param.dtype:
            raise ValueError(
                f"{where} in {declared}, as `param_dtype` says, got "
                f"{_arrays.describe(param)}; cast the params with "
                f"`Policy.cast_to_param`. {_PROMOTED}"
            )
        # It was its own master. Trained in this dtype it would lose small updates.
        if is_absent(stored) and _dtypes.is_floating(param) and not is_wide:
            raise ValueError(
                f"{where} as at `init`, got {_arrays.describe(param)}, for which the "
                "state holds no master; call `init` with the params as they are "
                "trained, or pass `param_dtype`."
            )
        # It would now be its own master, beside the one that the state has.
        if is_wide and not is_absent(stored):
            raise ValueError(
                f"{where} in a dtype narrower than its {self.master_dtype.name} "
                f"master, got {_arrays.describe(param)}; cast it back. {_PROMOTED}"
            )
        if not is_absent(stored):
            check_shape(where, param, stored)

    def check_master(self, path: tuple[Any, ...], master: Any) -> None:
        """Raise unless the decoded master of a param has the expected dtype."""
        # The type of the state does not say the `master_dtype`, so decode a master.
        if master.dtype != self.master_dtype:
            raise ValueError(
                f"mixed_precision: expected the master of param {_tree.spell(path)} in "
                f"{self.master_dtype}, got {_arrays.describe(master)}; convert the "
                "state with `optax_mp.convert_opt_state`."
            )


def check_shape(where: str, param: Any, stored: Any) -> None:
    """Raise unless what is stored can be the master of a param."""
    if not _dtypes.is_floating(param) or getattr(stored, "shape", None) != param.shape:
        raise ValueError(
            f"{where} to be a floating array of the shape of its master "
            f"{_arrays.describe(stored)}, got {_arrays.describe(param)}; call `init` "
            "again for other params."
        )
