"""mixed_precision: high-precision masters around any optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_mp._dtypes import bits, floating_dtype, round_to, saturating_cast
from optax_mp._inner_view import in_precision_of, own_master, without_aliases
from optax_mp._jax._choose import (
    Choice,
    is_marked,
    negative_zeros,
    step_if,
    unless_held,
)
from optax_mp._jax._kernels import KernelEnds
from optax_mp._jax._placement import place_like_params
from optax_mp._leaves import Leaves, is_absent
from optax_mp._transformation import as_transformation
from optax_mp._tree import describe, is_floating, is_inexact, place
from optax_mp.masters._access import MixedPrecisionState
from optax_mp.masters._checks import check_gradient, check_param, check_step
from optax_mp.masters._param_dtype import DeclaredDType, DTypeRule, declared_dtype
from optax_mp.masters.storage._contract import (
    FullCopy,
    Storage,
    check_storable,
    check_storage,
)

UpdateDType = DTypeLike | Literal["params"] | None

_FROM_MASTER = object()


def mixed_precision(
    inner: optax.GradientTransformation,
    master_dtype: DTypeLike = jnp.float32,
    *,
    param_dtype: DeclaredDType = None,
    update_dtype: UpdateDType = None,
    storage: Storage = FullCopy(),
) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on high-precision masters of low-precision params.

    A bfloat16 weight of 1.0 that receives a thousand updates of -0.001 is still 1.0,
    since each is less than half a unit in its last place. Here the updates add up in
    the master, which the optimizer state holds, and the param follows as the master
    rounded to its dtype. The inner optimizer sees masters, gradients and state in
    `master_dtype`, so its trajectory is bit for bit that of float32 training on the
    same gradients.

    A leaf at least as wide as `master_dtype` is its own master. Complex leaves are run
    by `inner` as they are. Integers, flags, keys, None and other leaves that are no
    floating arrays are hidden from `inner`, and their gradients come back untouched.

    The update of a leaf is `round(master) - param`, so after `optax.apply_updates` the
    param is the rounded master whatever finite value it had before. (An infinite or NaN
    param stays so, whatever is added: cast it anew from `master_params`.) Transforms
    that change updates afterwards act on this rounded difference: put them inside, or
    wrap `mixed_precision` last.

    Where all gradients are float32 negative zeros nothing moves: so a loss scale that
    is an earlier link of a chain marks a step to be skipped. (Not looked for in 16-bit
    gradients, where no leaf has a master, and under `shard_map` where gradients differ
    among ranks.)

    Args:
        inner: any optax optimizer or chain.
        master_dtype: the floating dtype of masters.
        param_dtype: what a float32 tree given to `init` will be cast to before
            training: a dtype, a `Policy`, or a function of (path string, leaf). By
            default each leaf's own. Calling `init` before the cast keeps the bits of
            pretrained weights in the masters; for random weights the order is free.
        update_dtype: the dtype of updates. None: that of the incoming gradients, as
            optax has it; from 16-bit gradients a param can then land half a unit of
            the step away from its master for one step. A floating dtype such as
            float32: updates in it, exact. `"params"`: each param's own dtype, for
            loops that add without casting back, such as `equinox.apply_updates`.
        storage: how masters are kept: `FullCopy()`, or `Split(bits=16)`, which is the
            same in 2 bytes a weight less, or `Split(bits=8)`. With `Split` updates of
            leaves with a master are float32 whatever the gradients are.

    Returns:
        The transformation. Extra arguments of `update` reach `inner`; `grad` is cast
        as the gradients are.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or `storage` no storage.
        ValueError: if a dtype is not floating; at `init`, if `master_dtype` has less
            than 32 bits and no param has fewer.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = optax_mp.mixed_precision(optax.sgd(1.0))
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     grads = {"w": jnp.full(2, 0.001, jnp.bfloat16)}
        ...     updates, state = tx.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].dtype.name, round(float(params["w"][0]), 2)
        ('bfloat16', 0.9)

    References:
        Micikevicius et al., Mixed Precision Training, 2018,
        https://arxiv.org/abs/1710.03740
    """
    inner = as_transformation(inner, "mixed_precision")
    master_dtype = floating_dtype(master_dtype, "mixed_precision: `master_dtype`")
    dtype_in_training = declared_dtype(param_dtype, "mixed_precision: `param_dtype`")
    checked: jnp.dtype | str | None = "params"
    if update_dtype is None:
        checked = None
    elif not (isinstance(update_dtype, str) and update_dtype == "params"):
        checked = floating_dtype(
            update_dtype, 'mixed_precision: `update_dtype`, if not None or "params",'
        )
    check_storage(storage, master_dtype, checked)
    settings = _Settings(master_dtype, dtype_in_training, checked, storage)

    def init_fn(params: optax.Params) -> MixedPrecisionState:
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        wanted = jax.dtypes.canonicalize_dtype(master_dtype)
        dtypes = list(map(dtype_in_training, leaves.paths, leaves.values))
        has_master = [x is not None and bits(x) < bits(wanted) for x in dtypes]
        _check_use(wanted, leaves, has_master)
        check_storable(storage, leaves.paths, leaves.values, dtypes, has_master)
        stored, seen = [], []
        for leaf, dtype, stores in zip(leaves.values, dtypes, has_master, strict=True):
            if dtype is None or not stores:
                own = leaf if dtype is None else leaf.astype(dtype)
                stored.append(optax.MaskedNode())
                seen.append(own_master(own))
                continue
            # A copy even where no cast is needed: the state must not alias the params.
            master = jnp.array(leaf, wanted, copy=True)
            param = round_to(master, dtype).astype(dtype)
            stored.append(storage.encode(master, param, dtype))
            seen.append(storage.decode(stored[-1], param, dtype))
        seen_by_inner = leaves.unflatten(seen)
        inner_state = place_like_params(inner.init(seen_by_inner), seen_by_inner)
        inner_state = without_aliases(inner_state, (leaves.values, stored, seen))
        return MixedPrecisionState(leaves.unflatten(stored), inner_state)

    def update_fn(
        updates: Any,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        step = _Step.matched(updates, state, params, settings)
        # Where no leaf has a master this is `inner` itself, and costs nothing.
        has_master = not all(map(is_absent, step.stored))
        marked = is_marked(updates) if has_master else False
        proceed = True if marked is False else jnp.logical_not(marked)
        leaves, ends = step.leaves, KernelEnds()

        def advance(before: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            stored, _, inner_state = before
            masters = step.masters(stored)
            seen = step.seen_by_inner(masters)
            inner_grads = leaves.unflatten(map(in_precision_of, seen, step.grads))
            extra = dict(extra_args)
            if extra.get("grad") is not None:
                grad = leaves.match(extra["grad"], "the extra argument `grad`")
                extra["grad"] = leaves.unflatten(map(in_precision_of, seen, grad))
            inner_updates, inner_state = inner.update(
                inner_grads.fast if step.is_lookahead else inner_grads,
                inner_state,
                leaves.unflatten(seen),
                **extra,
            )
            changes = leaves.match(inner_updates, "the updates of `inner`")
            masters, updates = step.moved(masters, changes)
            stored, updates = step.encoded(proceed, masters, updates, ends)
            return stored, updates, ends.after_all(inner_state)

        # The updates of leaves with a master are no part of the choice, but read off
        # afterwards from what is: so all that is chosen is overwritten in place.
        held = () if proceed is True else step.held()
        before = step.stored, held, state.inner_state
        stored, out, inner_state = step_if(proceed, advance, before)
        return leaves.unflatten(step.landed(proceed, stored, out)), MixedPrecisionState(
            leaves.unflatten(stored), inner_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Settings(NamedTuple):
    """What `mixed_precision` is told, checked."""

    master_dtype: jnp.dtype
    dtype_in_training: DTypeRule
    update_dtype: jnp.dtype | str | None
    storage: Storage


@dataclass(frozen=True)
class _Step:
    """What `update` is given, leaf by leaf: known to belong together.

    Attributes:
        leaves: the params.
        stored: the stored master of each, or `MaskedNode()`.
        grads: the gradient of each, or None or `MaskedNode()`.
        is_lookahead: whether the gradients of one copy of the params move two.
        settings: those of the transformation.
    """

    leaves: Leaves
    stored: list[Any]
    grads: Sequence[Any]
    is_lookahead: bool
    settings: _Settings

    @classmethod
    def matched(
        cls, updates: Any, state: Any, params: Any, settings: _Settings
    ) -> "_Step":
        if params is None:
            raise ValueError(
                "mixed_precision: `params` is None, expected the current params; call "
                "`tx.update(grads, state, params)`."
            )
        if not isinstance(state, MixedPrecisionState):
            raise TypeError(
                f"mixed_precision: `state` is a {type(state).__name__}, expected the "
                "MixedPrecisionState that `init` of this transform returns."
            )
        # `optax.lookahead` moves two copies of the params by the gradients of one.
        is_lookahead = isinstance(params, optax.LookaheadParams) and not isinstance(
            updates, optax.LookaheadParams
        )
        if is_lookahead:
            updates = optax.LookaheadParams(fast=updates, slow=updates)
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        stored = leaves.match(state.master_params, "the masters in the state")
        grads = leaves.match(updates, "the gradients")
        wanted = jax.dtypes.canonicalize_dtype(settings.master_dtype)
        for path, param, kept, grad in zip(
            leaves.paths, leaves.values, stored, grads, strict=True
        ):
            declared = settings.dtype_in_training(path, param)
            check_param(path, param, kept, wanted, declared, settings.storage)
            check_gradient(path, param, grad)
        return cls(leaves, stored, grads, is_lookahead, settings)

    def masters(self, stored: Sequence[Any]) -> list[Any]:
        """Return the master of each param that has one, else `MaskedNode()`."""
        decode = self.settings.storage.decode
        return [
            kept if is_absent(kept) else decode(kept, param, param.dtype)
            for param, kept in zip(self.leaves.values, stored, strict=True)
        ]

    def seen_by_inner(self, masters: Sequence[Any]) -> list[Any]:
        """Return what `inner` gets in the place of each param."""
        return [
            own_master(param) if is_absent(master) else master
            for param, master in zip(self.leaves.values, masters, strict=True)
        ]

    def held(self) -> list[Any]:
        """Return the updates of a step that is not taken, as `encoded` has them."""
        updates = list(self.grads)
        for i, kept in enumerate(self.stored):
            param, grad = self.leaves.values[i], self.grads[i]
            if is_absent(grad) or not is_inexact(param):
                continue
            if is_absent(kept):
                dtype = _dtype_of_update(self.settings.update_dtype, grad, param, True)
                updates[i] = negative_zeros(param, dtype)
            else:
                updates[i] = _FROM_MASTER if self._keeps_masters else param
        return updates

    def moved(
        self, masters: Sequence[Any], changes: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return (masters, updates) once `inner` has said its `changes`.

        Where `inner` sees nothing, the gradient comes back as it is. In the place of an
        update that is to be read off the new master stands `_FROM_MASTER`.
        """
        updates, moved = list(self.grads), list(masters)
        for i, change in enumerate(changes):
            param, grad = self.leaves.values[i], self.grads[i]
            if is_absent(masters[i]) and not is_inexact(param):
                continue
            if is_absent(change):
                updates[i] = change
                continue
            check_step(self.leaves.paths[i], param, grad, change)
            if is_absent(masters[i]):
                dtype = _dtype_of_update(self.settings.update_dtype, grad, param, True)
                updates[i] = _cast_update(change, dtype)
            else:
                moved[i] = optax.apply_updates(masters[i], change)
                updates[i] = _FROM_MASTER
        return moved, updates

    def encoded(
        self,
        proceed: Choice,
        masters: list[Any],
        updates: list[Any],
        ends: KernelEnds,
    ) -> tuple[list[Any], list[Any]]:
        """Return (stored masters, updates) once the masters have moved.

        Where what is stored is not the master, the value that the param is to take
        stands in the place of its update.
        """
        if self._keeps_masters:
            return masters, updates
        storage, stored, updates = (
            self.settings.storage,
            list(self.stored),
            list(updates),
        )
        for i, update in enumerate(updates):
            if update is not _FROM_MASTER:
                continue
            param = self.leaves.values[i]
            settled = _settled(storage, masters[i], param)
            settled = ends.written_out(settled, stored[i])
            target = storage.round(settled, param.dtype)
            stored[i] = storage.encode(settled, target, param.dtype)
            ends.then(stored[i])
            # In few bytes where a choice follows, which makes whole arrays of values.
            updates[i] = target if proceed is True else target.astype(param.dtype)
        return stored, updates

    def landed(
        self, proceed: Choice, stored: Sequence[Any], updates: Sequence[Any]
    ) -> list[Any]:
        """Return the updates that make params rounded masters."""
        landed = list(updates)
        for i, update in enumerate(updates):
            param = self.leaves.values[i]
            if is_absent(self.stored[i]) or is_absent(update):
                continue
            if self._keeps_masters:
                target = self.settings.storage.round(stored[i], param.dtype)
                dtype = _dtype_of_update(
                    self.settings.update_dtype, self.grads[i], param, False
                )
            else:
                # The param is half of the master: its update is not rounded.
                target, dtype = update.astype(jnp.float32), jnp.dtype(jnp.float32)
            change = unless_held(proceed, target - param.astype(target.dtype))
            landed[i] = _cast_update(change, dtype)
        return landed

    @property
    def _keeps_masters(self) -> bool:
        return isinstance(self.settings.storage, FullCopy)


def _check_use(master_dtype: jnp.dtype, leaves: Leaves, has_master: list[bool]) -> None:
    """Raise where masters of less than 32 bits would be no wider than any param."""
    if bits(master_dtype) >= 32 or any(has_master):
        return
    for path, leaf in zip(leaves.paths, leaves.values, strict=True):
        if is_floating(leaf):
            raise ValueError(
                f"mixed_precision: `master_dtype` is {master_dtype}, no wider than any "
                f"param (leaf {place(path)} is {describe(leaf)}), so that there would "
                "be no masters; expected float32, the default. What params will be "
                "cast to is said by `param_dtype`."
            )


def _settled(storage: Storage, master: jax.Array, param: jax.Array) -> jax.Array:
    """Return the master as it can be kept, once the param has taken its update.

    What the param will be a float32 sum says, which can miss what was meant.
    """
    before = param.astype(jnp.float32)
    change = storage.round(master, param.dtype) - before
    landing = round_to(before + change, param.dtype)
    stored = storage.encode(master, landing, param.dtype)
    return storage.decode(stored, landing, param.dtype)


def _dtype_of_update(
    update_dtype: Any, grad: Any, param: Any, isown_master: bool
) -> jnp.dtype:
    if update_dtype is None and is_floating(grad):
        return jax.dtypes.canonicalize_dtype(grad.dtype)
    # By `is`, since NumPy holds float64 for equal to None.
    if update_dtype is None or isinstance(update_dtype, str) or isown_master:
        return jax.dtypes.canonicalize_dtype(param.dtype)
    return update_dtype


def _cast_update(change: Any, dtype: jnp.dtype) -> jax.Array:
    change = jnp.asarray(change)
    if not is_floating(change) or not jnp.issubdtype(dtype, jnp.floating):
        return change
    # A float16 or float8 step between two finite params may be out of its range. Of
    # bfloat16, which has the range of float32, only steps over 3e38 are: no clamp.
    if jnp.finfo(dtype).nexp < jnp.finfo(change.dtype).nexp:
        return saturating_cast(change, dtype)
    return change.astype(dtype)
