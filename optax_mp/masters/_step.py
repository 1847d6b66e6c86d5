"""One step of `mixed_precision`: from masters and gradients to updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp._dtypes import (
    at_least_float32,
    bits,
    difference,
    round_to,
    saturating_cast,
)
from optax_mp.masters._settings import Settings
from optax_mp.masters._storage import as_own_arrays
from optax_mp.trees._leaves import ABSENT, Leaves
from optax_mp.trees._tree import is_floating
from optax_mp.wrappers._arguments import require_params
from optax_mp.wrappers._inner import MatchedArguments, as_inner_param


@dataclass(frozen=True)
class Step:
    """The arguments of one `update`, matched leaf by leaf and checked.

    Attributes:
        arguments: params and gradients.
        stored: what the state stores for each param.
        settings: the settings of the transformation.
    """

    arguments: MatchedArguments
    stored: Sequence[Any]
    settings: Settings

    @classmethod
    def match(cls, updates: Any, state: Any, params: Any, settings: Settings) -> "Step":
        """Return the step of an `update` with these arguments."""
        require_params(params, "mixed_precision")
        settings.check_dtypes()
        settings.check_state(state)
        leaves = Leaves.of(params, caller="mixed_precision")
        # Subtrees, because a storage may store several arrays for one master.
        stored = leaves.match_subtrees(state.master_params, "the masters in the state")
        for path, param, x in zip(leaves.paths, leaves.values, stored, strict=True):
            settings.check_param(path, param, x)
        return cls(MatchedArguments.match(updates, params, leaves), stored, settings)

    def _decode(self, last_exact: jax.Array | None) -> list[Any]:
        """Return what `inner` sees: masters, and params that are their own master.

        A param that was edited since the last step is its master.
        """
        storage, masters = self.settings.storage, list(self.stored)
        params = self.arguments.params
        for i, param in enumerate(params.values):
            if isinstance(masters[i], ABSENT):
                masters[i] = as_inner_param(param)
                continue
            master = storage.decode(masters[i], param)
            self.settings.check_master(params.paths[i], master)
            if last_exact is not None:
                master = _follow_if(last_exact, master, jnp.asarray(param))
            masters[i] = master
        return masters

    @property
    def _is_exact(self) -> bool:
        """Whether params are exactly their rounded masters after the update.

        If so, a param with another value was edited. A float32 sum of params of 16 or 8
        bits is exact, and so is a float64 sum of float32 params. The exception is a
        weight that a step shrinks to less than 2^-15 (float16: 2^-12) of its value.
        Such a param also becomes its master, which moves it by at most 2^-23 of the old
        weight.
        """
        params, grads = self.arguments.params.values, self.arguments.grads
        return all(
            bits(self._update_dtype(i)) >= max(32, bits(param.dtype) + 1)
            for i, param in enumerate(params)
            # Leaves without a gradient only decay, which is too little to miss.
            if is_floating(grads[i]) and not isinstance(self.stored[i], ABSENT)
        )

    def _update_dtype(self, i: int) -> jnp.dtype:
        param, grad = self.arguments.params.values[i], self.arguments.grads[i]
        has_master = not isinstance(self.stored[i], ABSENT)
        return self.settings.update_dtype_of(param, grad, has_master)

    def run(
        self, inner: Any, before: tuple[Any, Any, Any], extra_args: dict[str, Any]
    ) -> tuple[list[Any], tuple[list[Any], Any, jax.Array | None]]:
        """Return (updates, (stored, inner state, exact)) after an update of `inner`.

        `before` is what the state has of these, and stays in a skipped step.
        """
        _, inner_state, last_exact = before
        seen_by_inner, stored = self._decode(last_exact), list(self.stored)

        def advance(i: int, change: Any) -> jax.Array:
            if not isinstance(stored[i], ABSENT):
                master = optax.apply_updates(seen_by_inner[i], change)
                stored[i], change = self._advance_leaf(i, master)
            return _cast_update(change, self._update_dtype(i))

        updates, inner_state = self.arguments.run(
            inner, seen_by_inner, inner_state, extra_args, advance
        )
        if last_exact is not None:
            # Of the old one, whose type may vary over the ranks of a mesh.
            last_exact = last_exact | True if self._is_exact else last_exact & False
        return updates, (stored, inner_state, last_exact)

    def _advance_leaf(self, i: int, master: Any) -> tuple[Any, jax.Array]:
        """Return (stored, update) of a leaf whose master moves to `master`."""
        param, stored = self.arguments.params.values[i], self.stored[i]
        new_stored, target = self.settings.storage.advance(stored, param, master)
        # The difference to the actual param, not to the previous target: an update that
        # is rounded to 16 bits can miss its target, and the next one makes up for it.
        if target.dtype == param.dtype:
            target = target.astype(at_least_float32(target.dtype))
        else:
            target = round_to(target, param.dtype)
        update = difference(target, lax.convert_element_type(param, target.dtype))
        return as_own_arrays(new_stored), update


def _cast_update(update: Any, dtype: jnp.dtype) -> jax.Array:
    """Return `update` in a floating dtype; complex updates stay as they are."""
    update = update if isinstance(update, jax.Array) else jnp.asarray(update)
    if not is_floating(update) or not jnp.issubdtype(dtype, jnp.floating):
        return update
    # The difference of two finite float16 or float8 params may overflow their dtype.
    # bfloat16 has the range of float32: a clamp would only cost time.
    if jnp.finfo(dtype).nexp < jnp.finfo(update.dtype).nexp:
        return saturating_cast(update, dtype)
    return lax.convert_element_type(update, dtype)


# Jitted, so that it is traced once for all leaves of one shape and dtype.
@jax.jit
def _follow_if(follows: jax.Array, master: jax.Array, param: jax.Array) -> jax.Array:
    return lax.select(follows, follow_edits(master, param), master)


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
