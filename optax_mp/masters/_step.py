"""One step of `mixed_precision`: from masters and gradients to updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_mp._arguments import check_given_params
from optax_mp._choose import Choice, select
from optax_mp._dtypes import (
    at_least_float32,
    bits,
    check_available,
    difference,
    round_to,
    saturating_cast,
)
from optax_mp._inner import (
    as_inner_grad,
    as_inner_param,
    check_update,
    match_gradients,
    or_no_change,
)
from optax_mp._leaves import Leaves, is_absent
from optax_mp._policy import DTypeRule
from optax_mp._tree import is_floating, is_inexact, spell
from optax_mp.masters._checks import check_master, check_param, check_state
from optax_mp.masters._storage import FullCopy, Storage, as_own_arrays


class Settings(NamedTuple):
    """The arguments of `mixed_precision`, checked.

    Attributes:
        master_dtype: the dtype of masters.
        dtype_in_training: the dtype of each param in training, as the user declares it.
        update_dtype: the dtype of updates; `"params"`, or None for the gradients'.
        storage: how masters are kept.
    """

    master_dtype: jnp.dtype
    dtype_in_training: DTypeRule
    update_dtype: jnp.dtype | str | None
    storage: Storage

    def check_dtypes(self) -> None:
        """Raise if JAX does not have a dtype, as float64 without 64-bit types."""
        # At each call, because users may turn 64-bit types on after construction.
        check_available(self.master_dtype, "mixed_precision: `master_dtype`")
        if isinstance(self.update_dtype, np.dtype):
            check_available(self.update_dtype, "mixed_precision: `update_dtype`")


@dataclass(frozen=True)
class Step:
    """The arguments of one `update`, matched leaf by leaf and checked.

    Attributes:
        params: the params.
        stored: what the state stores for each param.
        grads: the gradient of each param, or None or `MaskedNode()`.
        is_lookahead: whether there are two copies of the params for one of gradients.
        settings: the settings of the transformation.
    """

    params: Leaves
    stored: Sequence[Any]
    grads: Sequence[Any]
    is_lookahead: bool
    settings: Settings

    @classmethod
    def match(cls, updates: Any, state: Any, params: Any, settings: Settings) -> "Step":
        """Return the step of an `update` with these arguments."""
        check_given_params(params, "mixed_precision")
        settings.check_dtypes()
        check_state(state, settings.storage)
        # `optax.lookahead` passes a fast and a slow copy of the params, and gradients
        # of the fast one. Here both get them, so that every param has a gradient.
        is_lookahead = isinstance(params, optax.LookaheadParams) and not isinstance(
            updates, optax.LookaheadParams
        )
        if is_lookahead:
            updates = optax.LookaheadParams(fast=updates, slow=updates)
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        # Subtrees, because a storage may store several arrays for one master.
        stored = leaves.match_subtrees(state.master_params, "the masters in the state")
        for path, param, x in zip(leaves.paths, leaves.values, stored, strict=True):
            declared = settings.dtype_in_training(path, param)
            dtypes = settings.master_dtype, declared
            check_param(spell(path), param, x, *dtypes, settings.storage)
        grads = match_gradients(leaves, updates)
        return cls(leaves, stored, grads, is_lookahead, settings)

    def decode(self) -> list[Any]:
        """Return the master of each param that has one, else `MaskedNode()`.

        Where the param was edited since the last step, it is the master.
        """
        master_dtype, storage = self.settings.master_dtype, self.settings.storage
        masters = list(self.stored)
        for i, param in enumerate(self.params.values):
            if is_absent(masters[i]):
                continue
            master = storage.decode(masters[i], param)
            check_master(spell(self.params.paths[i]), master, master_dtype, storage)
            if not storage.param_is_part and shows_edits(
                param.dtype, self._update_dtype(i)
            ):
                master = follow_edits(master, jnp.asarray(param))
            masters[i] = master
        return masters

    def as_seen_by_inner(
        self, masters: Sequence[Any], extra_args: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return (gradients, params, extra arguments) for `inner`.

        It sees the master of a param that has one, and gradients in the dtype of what
        it sees, also in the extra argument `grad`.
        """
        inner_params = [
            as_inner_param(param) if is_absent(master) else master
            for param, master in zip(self.params.values, masters, strict=True)
        ]

        def cast(grads: Sequence[Any]) -> Any:
            return self.params.unflatten(map(as_inner_grad, inner_params, grads))

        if extra_args.get("grad") is not None:
            grad = self.params.match(extra_args["grad"], "the extra argument `grad`")
            extra_args = {**extra_args, "grad": cast(grad)}
        grads = cast(self.grads)
        grads = grads.fast if self.is_lookahead else grads
        return grads, self.params.unflatten(inner_params), extra_args

    def apply_changes(
        self, masters: Sequence[Any], changes: Any, proceed: Choice
    ) -> tuple[list[Any], list[Any]]:
        """Return (stored, updates) after `inner` changed the masters by `changes`.

        If not `proceed`, the changes are dropped.
        """
        changes = self.params.match(changes, "the updates of `inner`")
        new_stored, updates = list(self.stored), list(self.grads)
        for i, change in enumerate(changes):
            path, param, grad = self.params.paths[i], self.params.values[i], updates[i]
            has_master = not is_absent(masters[i])
            is_hidden = not has_master and not is_inexact(param)
            if is_hidden or is_absent(change):
                updates[i] = or_no_change(grad if is_hidden else change, param)
                continue
            check_update(path, param, grad, change)
            if has_master:
                master = optax.apply_updates(masters[i], change)
                new_stored[i], change = self._advance_leaf(i, master, proceed)
            updates[i] = _cast_update(change, self._update_dtype(i))
        return new_stored, updates

    def _advance_leaf(
        self, i: int, master: Any, proceed: Choice
    ) -> tuple[Any, jax.Array]:
        """Return (stored, update) of a leaf whose master moves to `master`."""
        param, stored = self.params.values[i], self.stored[i]
        new_stored, target = self.settings.storage.advance(stored, param, master)
        if proceed is not True and type(self.settings.storage) is FullCopy:
            # The master that `choose_step` stores. From the new one alone, XLA would
            # write that one, too, and read it again for the param.
            target = select(proceed, target, stored)
        # The difference to the actual param, not to the previous target: an update that
        # is rounded to 16 bits can miss its target, and the next one makes up for it.
        if target.dtype == param.dtype:
            target = target.astype(at_least_float32(target.dtype))
        else:
            target = round_to(target, param.dtype)
        update = difference(target, lax.convert_element_type(param, target.dtype))
        return as_own_arrays(new_stored), update

    def _update_dtype(self, i: int) -> jnp.dtype:
        """Return the dtype of the update of a leaf."""
        has_master = not is_absent(self.stored[i])
        if has_master and self.settings.storage.param_is_part:
            # The param decodes the master: if it missed its target by a rounding, the
            # stored remainder would decode to another master.
            return jnp.dtype(jnp.float32)
        update_dtype = self.settings.update_dtype
        if has_master and isinstance(update_dtype, np.dtype):
            return update_dtype
        param, grad = self.params.values[i], self.grads[i]
        # `is` and not `==`, because NumPy takes None for float64.
        like = grad if update_dtype is None and is_floating(grad) else param
        return jax.dtypes.canonicalize_dtype(like.dtype)


def _cast_update(update: Any, dtype: jnp.dtype) -> jax.Array:
    """Return `update` in a floating dtype; complex updates stay as they are."""
    update = jnp.asarray(update)
    if not is_floating(update) or not jnp.issubdtype(dtype, jnp.floating):
        return update
    # The difference of two finite float16 or float8 params may overflow their dtype.
    # bfloat16 has the range of float32: a clamp would only cost time.
    if jnp.finfo(dtype).nexp < jnp.finfo(update.dtype).nexp:
        return saturating_cast(update, dtype)
    return lax.convert_element_type(update, dtype)


def shows_edits(param_dtype: jnp.dtype, update_dtype: jnp.dtype) -> bool:
    """Return whether updates of a dtype bring a param exactly to its rounded master.

    If so, a param with another value was edited. A float32 sum of params of 16 or 8
    bits is exact, and so is a float64 sum of float32 params. The exception is a weight
    that a step shrinks to less than 2^-15 (float16: 2^-12) of its value. Such a param
    becomes its master, too, which moves it by at most 2^-23 of the old weight.
    """
    return bits(update_dtype) >= 32 and bits(update_dtype) > bits(param_dtype)


def follow_edits(master: jax.Array, param: jax.Array) -> jax.Array:
    """Return `master`, or the param where it differs from the rounded master.

    An infinite or NaN param is no edit: a large weight may have overflowed in the cast,
    and an infinite param stays infinite whatever its master is.
    """
    wide = lax.convert_element_type(param, at_least_float32(master.dtype))
    # As numbers and not as bits: -0.0 is no edit of 0.0.
    is_edited = lax.is_finite(wide) & lax.ne(wide, round_to(master, param.dtype))
    edited = lax.convert_element_type(wide, master.dtype)
    return lax.select(is_edited, edited, master)
