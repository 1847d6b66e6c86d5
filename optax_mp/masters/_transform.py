"""mixed_precision: high-precision masters around any optimizer."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_mp._dtypes import bits, floating_dtype, round_to
from optax_mp._inner import as_transformation, own_master, without_aliases
from optax_mp._jax._choose import choose_step
from optax_mp._jax._placement import laid_as_params
from optax_mp._leaves import Leaves
from optax_mp._tree import place
from optax_mp.loss_scale._mark import is_unmarked
from optax_mp.masters._checks import check_storable
from optax_mp.masters._param_dtype import DeclaredDType, declared_dtype
from optax_mp.masters._state import MixedPrecisionState, state_type
from optax_mp.masters._step import Settings, Step
from optax_mp.masters.storage import FullCopy, Storage
from optax_mp.masters.storage._contract import check_decoded, check_storage

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
            stored.append(storage.encode(master, param))
            seen.append(storage.decode(stored[-1], param))
            check_decoded(storage, seen[-1], master, f"param {place(leaves.paths[i])}")
        seen_by_inner = leaves.unflatten(seen)
        inner_state = laid_as_params(inner.init(seen_by_inner), seen_by_inner)
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
    in_training = declared_dtype(param_dtype, "mixed_precision: `param_dtype`")
    is_params = isinstance(update_dtype, str) and update_dtype == "params"
    checked = "params" if is_params else None
    if not is_params and update_dtype is not None:
        checked = floating_dtype(
            update_dtype, 'mixed_precision: `update_dtype`, if not None or "params",'
        )
    check_storage(storage, wide, checked)
    return Settings(wide, in_training, checked, storage)
