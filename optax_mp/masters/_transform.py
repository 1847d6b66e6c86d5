"""mixed_precision: high-precision masters around any optimizer."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_mp._dtypes import bits, floating_dtype, round_to
from optax_mp._inner import as_transformation, own_master, without_aliases
from optax_mp._jax._choose import choose_step
from optax_mp._jax._placement import place_like_params
from optax_mp._leaves import Leaves
from optax_mp._tree import spell
from optax_mp.loss_scale._mark import is_unmarked
from optax_mp.masters._checks import check_storable
from optax_mp.masters._param_dtype import DeclaredDType, read_param_dtype
from optax_mp.masters._state import MixedPrecisionState, state_type
from optax_mp.masters._step import Settings, Step
from optax_mp.masters.storage import FullCopy, Storage
from optax_mp.masters.storage._contract import (
    as_stored,
    check_decoded,
    check_storage,
)

UpdateDType = DTypeLike | Literal["params"] | None


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
    because each update is less than half a unit in its last place. With this transform
    the updates add up in a float32 master, which the optimizer state holds, and the
    param follows it as the master rounded to the param's dtype. The inner optimizer
    sees masters, gradients and state in `master_dtype`. So, given the same gradients,
    its trajectory is bit for bit that of float32 training.

    - A leaf at least as wide as `master_dtype` is its own master: no copy is made.
      Complex leaves are passed to `inner` unchanged. Integers, bools, keys, None and
      other leaves that are not floating arrays are hidden from `inner`, and their
      gradients are returned unchanged.
    - The update of a leaf is `round(master) - param`. After `optax.apply_updates` the
      param is the rounded master, whatever finite value it had before. Infinite or NaN
      params stay that way; cast them anew from `master_params`.
    - Put this transform last in a chain, or around the chain. A later transform would
      change the rounded difference, and the next step would undo it.
    - If a loss scale is an earlier link of the same chain, a step that it skips is
      skipped here entirely, too. The link marks such a step by handing on float32
      gradients that are negative zero everywhere. The mark is not seen in 16-bit
      gradients, nor under `shard_map` if gradients differ among ranks.

    Args:
        inner: any optax optimizer or chain.
        master_dtype: the floating dtype of masters.
        param_dtype: pass this if you give `init` a float32 tree and cast it later: what
            you will cast it to. A dtype, a `Policy`, or a function of (path string,
            leaf); by default each leaf's own dtype. Calling `init` before the cast
            keeps the bits of pretrained weights in the masters.
        update_dtype: the dtype of updates. None, the default, is that of the incoming
            gradients, as for every optax optimizer; with 16-bit gradients a param can
            then be half a unit of its step away from its master for one step. With a
            floating dtype such as float32 updates are exact. With `"params"` each
            update has its param's dtype, for loops that add without casting back, such
            as `equinox.apply_updates`.
        storage: how masters are kept: `FullCopy()`; `Split(bits=16)`, lossless for
            bfloat16 params with 2 bytes per weight less; `Split(bits=8)`; or an object
            of your own with the members of `Storage`. With `Split`, updates of leaves
            with a master are always float32.

    Returns:
        The transformation. Extra arguments of `update` are forwarded to `inner`; `grad`
        is cast as the gradients are.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or `storage` lacks a
            member of `Storage`.
        ValueError: if a dtype is not floating; at `init`, if the storage cannot keep
            the masters of a param.

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
    settings = _check_settings(master_dtype, param_dtype, update_dtype, storage)
    state_of_storage = state_type(storage)

    def init_fn(params: optax.Params) -> MixedPrecisionState:
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        wanted = jax.dtypes.canonicalize_dtype(settings.master_dtype)
        dtypes = list(map(settings.dtype_in_training, leaves.paths, leaves.values))
        has_master = [x is not None and bits(x) < bits(wanted) for x in dtypes]
        check_storable(storage, leaves, dtypes, has_master, wanted)
        stored, seen = [], []
        for i, leaf in enumerate(leaves.values):
            dtype = dtypes[i]
            if dtype is None or not has_master[i]:
                own = leaf if dtype is None else leaf.astype(dtype)
                stored.append(optax.MaskedNode())
                seen.append(own_master(own))
                continue
            # A copy even where no cast is needed: the state must not alias the params.
            master = jnp.array(leaf, wanted, copy=True)
            param = round_to(master, dtype).astype(dtype)
            where = f"param {spell(leaves.paths[i])}"
            encoded = storage.encode(master, param)
            stored.append(as_stored(storage, encoded, param, where))
            seen.append(storage.decode(stored[-1], param))
            check_decoded(storage, seen[-1], master, where)
        seen_by_inner = leaves.unflatten(seen)
        inner_state = place_like_params(inner.init(seen_by_inner), seen_by_inner)
        inner_state = without_aliases(inner_state, (leaves.values, stored, seen))
        return state_of_storage(leaves.unflatten(stored), inner_state)

    def update_fn(
        updates: Any,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        step, stored = Step.match(updates, state, params, settings)
        leaves = step.params

        def advance(before: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
            stored, inner_state = before
            masters = step.decode(stored)
            seen = step.show(masters)
            inner_grads = step.show_gradients(seen, step.grads)
            extra = dict(extra_args)
            if extra.get("grad") is not None:
                grad = leaves.match(extra["grad"], "the extra argument `grad`")
                extra["grad"] = step.show_gradients(seen, grad)
            changes, inner_state = inner.update(
                inner_grads.fast if step.is_lookahead else inner_grads,
                inner_state,
                leaves.unflatten(seen),
                **extra,
            )
            changes = leaves.match(changes, "the updates of `inner`")
            stored, out = step.advance(stored, masters, changes)
            return out, (stored, inner_state)

        before = stored, state.inner_state
        out, (stored, inner_state) = choose_step(is_unmarked(updates), advance, before)
        return leaves.unflatten(out), state_of_storage(
            leaves.unflatten(stored), inner_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_settings(
    master_dtype: Any, param_dtype: Any, update_dtype: Any, storage: Any
) -> Settings:
    """Return the settings of `mixed_precision`, or raise."""
    wide = floating_dtype(master_dtype, "mixed_precision: `master_dtype`")
    in_training = read_param_dtype(param_dtype, "mixed_precision: `param_dtype`")
    is_params = isinstance(update_dtype, str) and update_dtype == "params"
    checked = "params" if is_params else None
    if not is_params and update_dtype is not None:
        checked = floating_dtype(
            update_dtype, 'mixed_precision: `update_dtype`, if not None or "params",'
        )
    check_storage(storage, wide, checked)
    return Settings(wide, in_training, checked, storage)
