"""mixed_precision: high-precision masters around any optimizer."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_mp._drift import check_gradient, check_param, check_step
from optax_mp._dtypes import bits, floating_dtype, round_to, saturate
from optax_mp._leaves import Leaves, is_absent
from optax_mp._master_access import MixedPrecisionState
from optax_mp._policy import DeclaredDType, declared_dtype
from optax_mp._storage import FullCopy, Storage, storage_of
from optax_mp._tree import PyTree, is_array, is_floating, is_optimized

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
    param is the rounded master whatever happened to it before. Transforms that change
    updates afterwards act on this rounded difference: put them inside, or wrap
    `mixed_precision` last.

    Args:
        inner: any optax optimizer or chain.
        master_dtype: the floating dtype of masters.
        param_dtype: what a float32 tree given to `init` will be cast to before
            training, so that masters keep the bits of pretrained weights: a dtype, a
            `Policy`, or a function of (path string, leaf). By default each leaf's own.
        update_dtype: the dtype of updates. None: that of the incoming gradients, as
            optax has it; from 16-bit gradients a param can then land half a unit of
            the step away from its master for one step. A floating dtype such as
            float32: updates in it, exact. `"params"`: each param's own dtype, for
            loops that add without casting back, such as `equinox.apply_updates`.
        storage: how masters are kept.

    Returns:
        The transformation. Extra arguments of `update` reach `inner`; `grad` is cast
        as the gradients are.

    Raises:
        TypeError: if `inner` is not a gradient transformation.
        ValueError: if a dtype is not floating.

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
    inner = _as_transformation(inner)
    master_dtype = floating_dtype(master_dtype, "mixed_precision: `master_dtype`")
    dtype_in_training = declared_dtype(param_dtype, "mixed_precision: `param_dtype`")
    if update_dtype is not None and update_dtype != "params":
        update_dtype = floating_dtype(
            update_dtype, 'mixed_precision: `update_dtype`, if not None or "params",'
        )

    def init_fn(params: optax.Params) -> MixedPrecisionState:
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        wanted = jax.dtypes.canonicalize_dtype(master_dtype)
        stored, seen = [], []
        for path, leaf in zip(leaves.paths, leaves.values, strict=True):
            dtype = dtype_in_training(path, leaf)
            if dtype is None or bits(dtype) >= bits(wanted):
                own = leaf if dtype is None else leaf.astype(dtype)
                stored.append(optax.MaskedNode())
                seen.append(_seen_by_inner(own, stored[-1]))
                continue
            # A copy even where no cast is needed: the state must not alias the params.
            master = jnp.array(leaf, wanted, copy=True)
            param = round_to(master, dtype).astype(dtype)
            stored.append(storage.encode(master, param)[0])
            seen.append(storage.decode(stored[-1], param))
        inner_state = inner.init(leaves.unflatten(seen))
        inner_state = _without_aliases(inner_state, (leaves.values, stored, seen))
        return MixedPrecisionState(leaves.unflatten(stored), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        if params is None:
            raise ValueError(
                "mixed_precision: `params` is None, expected the current params; call "
                "`tx.update(grads, state, params)`."
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
        wanted = jax.dtypes.canonicalize_dtype(master_dtype)
        for path, param, kept, grad in zip(
            leaves.paths, leaves.values, stored, grads, strict=True
        ):
            check_param(path, param, kept, wanted, dtype_in_training(path, param))
            check_gradient(path, param, grad)

        seen = [
            _seen_by_inner(param, kept)
            for param, kept in zip(leaves.values, stored, strict=True)
        ]
        if extra_args.get("grad") is not None:
            grad = leaves.match(extra_args["grad"], "the extra argument `grad`")
            extra_args["grad"] = leaves.unflatten(map(_in_precision_of, seen, grad))
        inner_grads = leaves.unflatten(map(_in_precision_of, seen, grads))
        inner_updates, inner_state = inner.update(
            inner_grads.fast if is_lookahead else inner_grads,
            state.inner_state,
            leaves.unflatten(seen),
            **extra_args,
        )
        steps = leaves.match(inner_updates, "the updates of `inner`")

        new_stored, new_updates = list(stored), list(grads)
        for i, (param, step) in enumerate(zip(leaves.values, steps, strict=True)):
            if is_absent(seen[i]):
                continue
            if is_absent(step):
                new_updates[i] = step
                continue
            check_step(leaves.paths[i], param, grads[i], step)
            is_own_master = is_absent(stored[i])
            if not is_own_master:
                master: Any = optax.apply_updates(seen[i], step)
                new_stored[i], landing = storage.encode(master, param)
                step = landing - param.astype(landing.dtype)
            dtype = _dtype_of_update(update_dtype, grads[i], param, is_own_master)
            new_updates[i] = _cast_update(step, dtype)
        return leaves.unflatten(new_updates), MixedPrecisionState(
            leaves.unflatten(new_stored), inner_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` would drop the extra arguments.
        update: Any = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"mixed_precision: `inner` is a {type(inner).__name__}, expected an optax "
            "gradient transformation; call its factory first, as `optax.adamw(1e-3)`."
        )
    return optax.with_extra_args_support(inner)


def _seen_by_inner(param: Any, kept: Any) -> Any:
    if not is_absent(kept):
        return storage_of(kept).decode(kept, param)
    if not is_optimized(param):
        return optax.MaskedNode()
    # Moments made from a weakly typed value would turn strong at the first update.
    weak = not is_array(param) or getattr(param, "weak_type", False)
    return jnp.asarray(param, jnp.result_type(param)) if weak else param


def _in_precision_of(seen: Any, grad: Any) -> Any:
    """Return the gradient in the dtype of what `inner` sees as its param."""
    if is_absent(seen):
        return seen
    if is_absent(grad) or not (is_floating(grad) and is_floating(seen)):
        return grad
    return grad.astype(seen.dtype)


def _dtype_of_update(
    update_dtype: Any, grad: Any, param: Any, is_own_master: bool
) -> jnp.dtype:
    if update_dtype is None and is_floating(grad):
        return grad.dtype
    if update_dtype in (None, "params") or is_own_master:
        return jnp.result_type(param)
    return update_dtype


def _cast_update(step: Any, dtype: jnp.dtype) -> jax.Array:
    step = jnp.asarray(step)
    if not is_floating(step) or not jnp.issubdtype(dtype, jnp.floating):
        return step
    # A float16 or float8 step between two finite params may be out of its range. Of
    # bfloat16, which has the range of float32, only steps over 3e38 are: no clamp.
    if jnp.finfo(dtype).nexp < jnp.finfo(step.dtype).nexp:
        step = saturate(step, dtype)
    return step.astype(dtype)


def _without_aliases(state: PyTree, others: PyTree) -> PyTree:
    """Copy what `state` shares with `others` or holds twice, so all can be donated.

    Some optimizers keep the params given to `init`, or the same zeros in two places.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(others)}

    def owned(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        if id(leaf) in taken:
            leaf = jnp.array(leaf, copy=True)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(owned, state)
