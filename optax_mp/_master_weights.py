"""mixed_precision: high-precision masters around any optimizer, and access to them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jax.typing import DTypeLike

from optax_mp._dtypes import bits, floating_dtype, round_to
from optax_mp._leaves import Leaves, is_absent
from optax_mp._policy import Policy
from optax_mp._storage import FullCopy, Storage, storage_of
from optax_mp._tree import PyTree, describe, is_array, is_floating, slashed

ParamDType = DTypeLike | Policy | Callable[[str, Any], DTypeLike | None] | None
UpdateDType = DTypeLike | Literal["params"] | None


class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Attributes:
        master_params: a tree like the params, with the stored master of each leaf that
            has one and `optax.MaskedNode()` for each leaf that is its own master.
        inner_state: the state of the inner optimizer, over masters.
    """

    master_params: optax.Params
    inner_state: optax.OptState


def mixed_precision(
    inner: optax.GradientTransformation,
    master_dtype: DTypeLike = jnp.float32,
    *,
    param_dtype: ParamDType = None,
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
    declared_dtype = _declared_dtype_rule(param_dtype)
    if update_dtype is not None and update_dtype != "params":
        update_dtype = floating_dtype(
            update_dtype, 'mixed_precision: `update_dtype`, if not None or "params",'
        )

    def init_fn(params: optax.Params) -> MixedPrecisionState:
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        wanted = jax.dtypes.canonicalize_dtype(master_dtype)
        stored, seen = [], []
        for path, leaf in zip(leaves.paths, leaves.values, strict=True):
            dtype = declared_dtype(path, leaf)
            if dtype is None or bits(dtype) >= bits(wanted):
                stored.append(optax.MaskedNode())
                seen.append(_seen_by_inner(leaf, stored[-1]))
                continue
            # A copy even where no cast is needed: the state must not alias the params.
            master = jnp.array(leaf, wanted, copy=True)
            param = round_to(master, dtype).astype(dtype)
            stored.append(storage.encode(master, param)[0])
            seen.append(storage.decode(stored[-1], param))
        inner_state = inner.init(leaves.unflatten(seen))
        inner_state = _copy_aliases(inner_state, (leaves.values, stored, seen))
        return MixedPrecisionState(leaves.unflatten(stored), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: MixedPrecisionState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        if params is None:
            raise ValueError(
                "mixed_precision: `params` is None, expected the current params; call "
                "`tx.update(grads, state, params)`."
            )
        leaves = Leaves.of(params, caller="mixed_precision", name="`params`")
        stored = leaves.match(state.master_params, "the masters in the state")
        grads = leaves.match(updates, "the gradients")
        wanted = jax.dtypes.canonicalize_dtype(master_dtype)
        for path, param, kept, grad in zip(
            leaves.paths, leaves.values, stored, grads, strict=True
        ):
            _check_param(path, param, kept, wanted, declared_dtype(path, param))
            _check_gradient(path, param, grad)

        seen = [
            _seen_by_inner(param, kept)
            for param, kept in zip(leaves.values, stored, strict=True)
        ]
        if extra_args.get("grad") is not None:
            grad = leaves.match(extra_args["grad"], "the extra argument `grad`")
            extra_args["grad"] = leaves.unflatten(map(_upcast, grad, seen))
        inner_updates, inner_state = inner.update(
            leaves.unflatten(map(_upcast, grads, seen)),
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
            _check_step(leaves.paths[i], param, grads[i], step)
            is_own_master = is_absent(stored[i])
            if not is_own_master:
                master = optax.apply_updates(seen[i], step)
                new_stored[i], landing = storage.encode(master, param)
                step = landing - param.astype(landing.dtype)
            dtype = _dtype_of_update(update_dtype, grads[i], param, is_own_master)
            new_updates[i] = _cast_update(step, dtype)
        return leaves.unflatten(new_updates), MixedPrecisionState(
            leaves.unflatten(new_stored), inner_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def master_params(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Return the params in high precision: the masters, wherever the state holds them.

    What to evaluate, average, export or checkpoint as the true weights. Leaves without
    a master are returned as they are in `params`.

    Args:
        opt_state: a state with `mixed_precision` in it, at any depth of wrappers; its
            parts may each hold some of the leaves, as under `optax.partition`.
        params: the current params.

    Returns:
        A tree like `params`.

    Raises:
        ValueError: if the state holds no `MixedPrecisionState`, or one of other params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = optax.chain(optax_mp.mixed_precision(optax.sgd(0.1)))
        >>> optax_mp.master_params(tx.init(params), params)["w"].dtype.name
        'float32'
    """
    leaves = Leaves.of(params, caller="master_params", name="`params`")
    result = list(leaves.values)
    for state in _states_of(opt_state, "master_params"):
        stored = leaves.match(state.master_params, "the masters in `opt_state`")
        for i, kept in enumerate(stored):
            if not is_absent(kept):
                result[i] = storage_of(kept).decode(kept, leaves.values[i])
    return leaves.unflatten(result)


def replace_master_params(
    opt_state: optax.OptState, params: optax.Params, new_master: optax.Params
) -> optax.OptState:
    """Return `opt_state` with other masters, such as weights loaded after `init`.

    Everything else in the state stays. The next update moves the params to the new
    masters; to have them there before, cast: `cast_floating(new_master, ...)`. Leaves
    that are their own master live in the params alone, so set those there.

    Args:
        opt_state: a state with `mixed_precision` in it, at any depth of wrappers.
        params: the params that the state belongs to.
        new_master: a tree like `params`, in any floating dtype.

    Returns:
        The new state; it shares no buffer with `new_master`.

    Raises:
        ValueError: if the state holds no `MixedPrecisionState`, or if a structure or
            shape differs.
        TypeError: if a new master is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = optax_mp.mixed_precision(optax.sgd(0.1)).init(params)
        >>> loaded = {"w": jnp.array([1.001, 2.002])}
        >>> state = optax_mp.replace_master_params(state, params, loaded)
        >>> optax_mp.master_params(state, params)["w"].tolist() == loaded["w"].tolist()
        True
    """
    leaves = Leaves.of(params, caller="replace_master_params", name="`params`")
    given = leaves.match(new_master, "`new_master`")
    _states_of(opt_state, "replace_master_params")

    def replaced(path: Any, param: Any, kept: Any, new: Any) -> Any:
        if is_absent(kept):
            return kept
        storage = storage_of(kept)
        old = storage.decode(kept, param)
        if not is_floating(new):
            raise TypeError(
                f"replace_master_params: `new_master` at {keystr(path)} is "
                f"{describe(new)}, expected a floating array like {describe(old)}."
            )
        if new.shape != old.shape:
            raise ValueError(
                f"replace_master_params: `new_master` at {keystr(path)} is "
                f"{describe(new)}, expected the shape of the master {describe(old)}."
            )
        return storage.encode(jnp.array(new, old.dtype, copy=True), param)[0]

    def in_state(node: Any) -> Any:
        if not isinstance(node, MixedPrecisionState):
            return node
        stored = leaves.match(node.master_params, "the masters in `opt_state`")
        new = map(replaced, leaves.paths, leaves.values, stored, given)
        return MixedPrecisionState(
            leaves.unflatten(new), _map_states(in_state, node.inner_state)
        )

    return _map_states(in_state, opt_state)


def _map_states(function: Callable[[Any], Any], opt_state: optax.OptState) -> Any:
    return jax.tree.map(
        function, opt_state, is_leaf=lambda x: isinstance(x, MixedPrecisionState)
    )


def _states_of(opt_state: optax.OptState, caller: str) -> list[MixedPrecisionState]:
    found: list[MixedPrecisionState] = []

    def collect(node: Any) -> None:
        if isinstance(node, MixedPrecisionState):
            found.append(node)
            _map_states(collect, node.inner_state)

    _map_states(collect, opt_state)
    if not found:
        raise ValueError(
            f"{caller}: `opt_state` holds no MixedPrecisionState, expected the state of "
            "an optimizer with optax_mp.mixed_precision in it."
        )
    return found


def _as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` would drop the extra arguments.
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"mixed_precision: `inner` is a {type(inner).__name__}, expected an optax "
            "gradient transformation; call the factory first, as in `optax.adamw(1e-3)`."
        )
    return optax.with_extra_args_support(inner)


def _declared_dtype_rule(
    param_dtype: ParamDType,
) -> Callable[[tuple[Any, ...], Any], jnp.dtype | None]:
    """Return which dtype the leaf at a path has in training; None if not floating."""
    argument = "mixed_precision: `param_dtype`"
    is_dtype = isinstance(param_dtype, (type, str)) or not callable(param_dtype)
    if param_dtype is None or isinstance(param_dtype, Policy):
        fixed = None
    elif is_dtype:
        fixed = floating_dtype(param_dtype, argument)

    def rule(path: tuple[Any, ...], leaf: Any) -> jnp.dtype | None:
        if not is_floating(leaf):
            return None
        if isinstance(param_dtype, Policy):
            return param_dtype.param_dtype_of(slashed(path), leaf)
        if param_dtype is None or is_dtype:
            return fixed or leaf.dtype
        said = param_dtype(slashed(path), leaf)
        where = f"{argument} for {keystr(path)}"
        return leaf.dtype if said is None else floating_dtype(said, where)

    return rule


def _is_optimized(leaf: Any) -> bool:
    """Whether `inner` sees the leaf: real and complex floating ones, not integers."""
    if is_array(leaf):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return isinstance(leaf, (float, complex))


def _seen_by_inner(param: Any, kept: Any) -> Any:
    if not is_absent(kept):
        return storage_of(kept).decode(kept, param)
    if not _is_optimized(param):
        return optax.MaskedNode()
    # Moments made from a weakly typed value would turn strong at the first update.
    weak = not is_array(param) or getattr(param, "weak_type", False)
    return jnp.asarray(param, jnp.result_type(param)) if weak else param


def _upcast(grad: Any, seen: Any) -> Any:
    """Return the gradient in at least the precision of what `inner` sees it with."""
    if is_absent(seen):
        return seen
    if is_absent(grad) or not (is_floating(grad) and is_floating(seen)):
        return grad
    return grad.astype(jnp.promote_types(grad.dtype, seen.dtype))


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
    if bits(dtype) < bits(step.dtype):
        step = round_to(step, dtype)
    return step.astype(dtype)


def _copy_aliases(tree: PyTree, others: PyTree) -> PyTree:
    """Copy the arrays of `tree` that are also in `others`, so that all can be donated.

    Some optimizers keep the params that they are given at `init` in their state.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(others) if is_array(leaf)}
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, copy=True) if id(leaf) in taken else leaf, tree
    )


def _check_param(
    path: tuple[Any, ...],
    param: Any,
    kept: Any,
    master_dtype: jnp.dtype,
    declared: jnp.dtype | None,
) -> None:
    """Raise unless `param` is still what it was, by what the state keeps for it."""
    where = f"mixed_precision: param {keystr(path)} is {describe(param)}"
    narrow = is_floating(param) and bits(param.dtype) < bits(master_dtype)
    if not is_absent(kept) and not narrow:
        raise ValueError(
            f"{where}, expected a floating dtype narrower than its {master_dtype.name} "
            "master: it was at `init`, and something promoted it since. If "
            "`equinox.apply_updates` did, which adds float32 updates without casting "
            'back, build the transform with `update_dtype="params"`; else cast the '
            "params back with `optax_mp.cast_floating`."
        )
    if is_absent(kept) and narrow:
        raise ValueError(
            f"{where}, and the state holds no master for it: at `init` it was not "
            f"floating or was as wide as {master_dtype.name}. Call `init` with params "
            "in the dtype they are trained in, or say which it will be with "
            "`param_dtype`."
        )
    if is_floating(param) and declared != param.dtype:
        raise ValueError(
            f"{where}, expected {declared} as `param_dtype` says; cast the params with "
            "`optax_mp.cast_floating` or `Policy.cast_to_param` before training."
        )
    if is_absent(kept):
        return
    master = storage_of(kept).decode(kept, param)
    if master.shape != param.shape:
        raise ValueError(
            f"{where}, but its master is {describe(master)}, expected the same shape: "
            "the state belongs to other params; call `init` again."
        )


def _check_gradient(path: tuple[Any, ...], param: Any, grad: Any) -> None:
    if is_absent(grad):
        return
    where = f"mixed_precision: the gradient of {keystr(path)} is {describe(grad)}"
    if not _is_optimized(param):
        if _is_optimized(grad):
            raise TypeError(
                f"{where}, but the param is {describe(param)}, which cannot be trained; "
                "expected None or the float0 gradient of `jax.grad(..., allow_int=True)`"
                "; make the param floating, or its gradient None."
            )
        return
    if not _is_optimized(grad):
        raise TypeError(
            f"{where}, expected a floating gradient for the param {describe(param)}; "
            "for a leaf that is not trained pass None."
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


def _check_step(path: tuple[Any, ...], param: Any, grad: Any, step: Any) -> None:
    if jnp.shape(step) != jnp.shape(param):
        raise ValueError(
            f"mixed_precision: the gradient of {keystr(path)} is {describe(grad)}, for "
            f"which `inner` gives an update {describe(step)}; expected the shape of the "
            f"param {describe(param)}."
        )
