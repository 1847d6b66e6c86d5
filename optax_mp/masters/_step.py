"""One step of `mixed_precision`, leaf by leaf."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_mp._dtypes import round_to, saturating_cast
from optax_mp._inner import in_precision_of, own_master
from optax_mp._leaves import Leaves, is_absent
from optax_mp._tree import is_floating, is_inexact, spell
from optax_mp.masters._checks import (
    check_gradient,
    check_master,
    check_param,
    check_state,
    check_update,
)
from optax_mp.masters._param_dtype import DTypeRule
from optax_mp.masters.storage import Storage
from optax_mp.masters.storage._contract import as_kept, check_target


class Settings(NamedTuple):
    """What `mixed_precision` is told, checked.

    Attributes:
        master_dtype: of masters.
        dtype_in_training: of each param in training, as the user declares it.
        update_dtype: of updates: a dtype, `"params"`, or None for the gradients'.
        storage: how masters are kept.
    """

    master_dtype: jnp.dtype
    dtype_in_training: DTypeRule
    update_dtype: jnp.dtype | str | None
    storage: Storage


@dataclass(frozen=True)
class Step:
    """What `update` is given, leaf by leaf, checked to belong together.

    Attributes:
        params: the params.
        grads: the gradient of each, or None or `MaskedNode()`.
        is_lookahead: whether the gradients of one copy of the params move two.
        settings: those of the transformation.
    """

    params: Leaves
    grads: Sequence[Any]
    is_lookahead: bool
    settings: Settings

    @classmethod
    def match(
        cls, updates: Any, state: Any, params: Any, settings: Settings
    ) -> tuple["Step", list[Any]]:
        """Return the step, and what the state stores for each param."""
        if params is None:
            raise ValueError(
                "mixed_precision: `params` is None, expected the current params; call "
                "`tx.update(grads, state, params)`."
            )
        check_state(state, settings.storage)
        # `optax.lookahead` moves two copies of the params by the gradients of one.
        is_lookahead = isinstance(params, optax.LookaheadParams) and not isinstance(
            updates, optax.LookaheadParams
        )
        if is_lookahead:
            updates = optax.LookaheadParams(fast=updates, slow=updates)
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        stored = leaves.match_subtrees(state.master_params, "the masters in the state")
        grads = leaves.match(updates, "the gradients")
        wanted = jax.dtypes.canonicalize_dtype(settings.master_dtype)
        for path, param, kept, grad in zip(
            leaves.paths, leaves.values, stored, grads, strict=True
        ):
            declared = settings.dtype_in_training(path, param)
            check_param(path, param, kept, wanted, declared, settings.storage)
            check_gradient(path, param, grad)
        return cls(leaves, grads, is_lookahead, settings), stored

    def decode(self, stored: Sequence[Any]) -> list[Any]:
        """Return the master of each param that has one, else `MaskedNode()`."""
        wanted = jax.dtypes.canonicalize_dtype(self.settings.master_dtype)
        masters = list(stored)
        for i, kept in enumerate(stored):
            if not is_absent(kept):
                path, param = self.params.paths[i], self.params.values[i]
                masters[i] = self.settings.storage.decode(kept, param)
                check_master(path, param, masters[i], wanted, self.settings.storage)
        return masters

    def show(self, masters: Sequence[Any]) -> list[Any]:
        """Return what `inner` sees in the place of each param."""
        return [
            own_master(param) if is_absent(master) else master
            for param, master in zip(self.params.values, masters, strict=True)
        ]

    def show_gradients(self, seen: Sequence[Any], grads: Sequence[Any]) -> Any:
        """Return the gradients for `inner`, in the precision of the params it sees."""
        return self.params.unflatten(map(in_precision_of, seen, grads))

    def advance(
        self, stored: Sequence[Any], masters: Sequence[Any], changes: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return (stored, updates) after the changes that `inner` makes of masters."""
        new_stored, updates = list(stored), list(self.grads)
        for i, change in enumerate(changes):
            path, param, grad = self.params.paths[i], self.params.values[i], updates[i]
            is_hidden = is_absent(stored[i]) and not is_inexact(param)
            if is_hidden or is_absent(change):
                # The gradient of what `inner` does not see comes back as it is.
                updates[i] = grad if is_hidden else change
                continue
            check_update(path, param, grad, change)
            if is_absent(stored[i]):
                updates[i] = _cast_update(change, self._update_dtype(param, grad))
            else:
                master = optax.apply_updates(masters[i], change)
                new_stored[i], updates[i] = self._advance_leaf(i, stored[i], master)
        return new_stored, updates

    def _advance_leaf(self, i: int, stored: Any, master: Any) -> tuple[Any, jax.Array]:
        storage, param = self.settings.storage, self.params.values[i]
        new_stored, target = storage.advance(stored, param, master)
        where = f"param {spell(self.params.paths[i])}"
        new_stored = as_kept(storage, new_stored, stored, where)
        check_target(storage, target, param, where)
        # Read off the rounded target and the actual param, so that what one update
        # misses, rounded to the dtype of 16-bit gradients, the next one makes up for.
        target = round_to(target, param.dtype)
        update = target - param.astype(target.dtype)
        return new_stored, _cast_update(update, self._update_dtype_of_master(i))

    def _update_dtype_of_master(self, i: int) -> jnp.dtype:
        if self.settings.storage.param_is_part:
            # A param that missed its target would be the part of another master.
            return jnp.dtype(jnp.float32)
        wanted = self.settings.update_dtype
        # By `is`, since NumPy holds float64 for equal to None.
        if wanted is None or isinstance(wanted, str):
            return self._update_dtype(self.params.values[i], self.grads[i])
        return wanted

    def _update_dtype(self, param: Any, grad: Any) -> jnp.dtype:
        """Return the dtype of the update of a leaf that is its own master."""
        like_grad = self.settings.update_dtype is None and is_floating(grad)
        return jax.dtypes.canonicalize_dtype((grad if like_grad else param).dtype)


def _cast_update(change: Any, dtype: jnp.dtype) -> jax.Array:
    change = jnp.asarray(change)
    if not is_floating(change) or not jnp.issubdtype(dtype, jnp.floating):
        return change
    # A float16 or float8 step between two finite params may be out of its range. Of
    # bfloat16, which has the range of float32, only steps over 3e38 are: no clamp.
    if jnp.finfo(dtype).nexp < jnp.finfo(change.dtype).nexp:
        return saturating_cast(change, dtype)
    return change.astype(dtype)
