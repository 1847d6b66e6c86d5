"""Read and replace masters, at any depth of an optimizer state."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._arguments import check_state_first
from optax_mp._dtypes import at_least_float32, bits, round_to
from optax_mp._jax._arrays import is_traced
from optax_mp._jax._explicit import reshard_beside
from optax_mp._jax._memory import bring, put_beside
from optax_mp._leaves import Leaves, expand_absent, is_absent
from optax_mp._nesting import check_nesting
from optax_mp._nnx import plain_trees
from optax_mp._states import check_classes, find_states, map_states
from optax_mp._tree import describe, is_floating, spell
from optax_mp.masters._state import MixedPrecisionState, storage_of
from optax_mp.masters.storage import Storage
from optax_mp.masters.storage._contract import list_taken_dtypes


def master_params(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Return the params in high precision: the masters, at any depth of the state.

    Evaluate, average and export these as the weights. Leaves without a master are
    returned as they are in `params`. If the state holds no masters at all, all floating
    params are returned in float32, or wider if they are, so that one script serves
    every precision.

    Masters that `offload` keeps in host memory come back in device memory, all of them:
    4 bytes per weight. Where that is too much, compute them on the host's CPU, from
    NumPy arrays: `with jax.default_device(jax.devices("cpu")[0]):
    master_params(*jax.device_get((opt_state, params)))`.

    Args:
        opt_state: any optimizer state, with `mixed_precision` at any depth of wrappers
            or without. Under `optax.partition` it may hold several, each with some of
            the leaves. Or an `nnx.Optimizer`.
        params: the current params. Or the `nnx.Module` that the optimizer trains.

    Returns:
        A tree like `params`; for NNX an `nnx.State` of arrays, for `nnx.update`.

    Raises:
        TypeError: if `opt_state` is no optimizer state, or comes second.
        ValueError: if the state holds a `MixedPrecisionState` of other params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = optax.chain(optax_mp.mixed_precision(optax.sgd(0.1)))
        >>> optax_mp.master_params(tx.init(params), params)["w"].dtype.name
        'float32'
    """
    caller = "master_params"
    opt_state, params = plain_trees(opt_state, params)
    check_state_first(opt_state, params, caller, "master_params(opt_state, params)")
    check_nesting(opt_state, caller)
    found = find_states(opt_state, MixedPrecisionState)
    if not found:
        check_classes(opt_state, caller)
        return jax.tree.map(_widen, params)
    leaves = Leaves.of(params, caller=caller, name="`params`")
    result = list(leaves.values)
    for i, master, _ in decode_all(leaves, [state for _, state in found], caller):
        result[i] = master
    return leaves.unflatten(result)


def decode_all(
    params: Leaves, states: Sequence[MixedPrecisionState], caller: str
) -> Iterator[tuple[int, jax.Array, Any]]:
    """Yield which param has a master, the master, and what is stored for it."""
    for state in states:
        storage = storage_of(state, caller)
        for i, stored in enumerate(match_stored(params, state)):
            if not is_absent(stored):
                where = f"{caller}: param {spell(params.paths[i])}"
                yield i, decode_master(storage, stored, params.values[i], where), stored


def replace_master_params(
    opt_state: optax.OptState, params: optax.Params, new_master: optax.Params
) -> optax.OptState:
    """Return `opt_state` with new masters, such as weights loaded after `init`.

    Everything else in the state stays. The next update moves finite params to the new
    masters. To move them now, cast the params: `Policy.cast_to_param(new_master)`.

    With `Split`, where the param is part of the master, `params` must be the cast new
    masters (outside of `jit` it is an error if they are not). Leaves that are their own
    master live in the params alone, so set those there. New masters take the sharding
    of the old ones.

    Args:
        opt_state: a state with `mixed_precision` in it, at any depth of wrappers.
        params: the params that the state belongs to.
        new_master: a tree like `params`, in any floating dtype.

    Returns:
        The new state. It shares no buffer with `new_master`.

    Raises:
        ValueError: if the state holds no `MixedPrecisionState`, or if a structure or
            shape differs.
        TypeError: if a new master is not floating, or if `opt_state` is no optimizer
            state, or not the first argument.

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
    caller = "replace_master_params"
    new_master = plain_trees(opt_state, new_master)[1]
    opt_state, params = plain_trees(opt_state, params)
    call = "replace_master_params(opt_state, params, new_master)"
    check_state_first(opt_state, params, caller, call)
    if not find_states(opt_state, MixedPrecisionState):
        raise ValueError(
            f"{caller}: `opt_state` holds no MixedPrecisionState, expected the state "
            "of an optimizer with optax_mp.mixed_precision in it. This optimizer keeps "
            "no masters; replace `params`."
        )
    leaves = Leaves.of(params, caller=caller, name="`params`")
    given = leaves.match(new_master, "`new_master`")

    def replace(state: MixedPrecisionState) -> MixedPrecisionState:
        storage = storage_of(state, caller)
        new_stored = match_stored(leaves, state)
        for i, stored in enumerate(new_stored):
            if not is_absent(stored):
                at = spell(leaves.paths[i])
                param = reshard_beside(leaves.values[i], stored)
                old = decode_master(storage, stored, param, f"{caller}: param {at}")
                where = f"{caller}: `new_master` at {at}"
                _check_not_swapped(given[i], param, old, where, call)
                new = _like_old_master(given[i], old, where)
                if storage.param_is_part:
                    _check_param_is_rounded(storage, new, param, where)
                new_stored[i] = put_beside(storage.encode(new, param), stored)
        return replace_stored(leaves, state, new_stored)

    return map_states(replace, opt_state, MixedPrecisionState)


def _check_not_swapped(new: Any, param: Any, old: Any, where: str, call: str) -> None:
    """Raise if the param is as wide as its master, and the new master is not."""
    both = is_floating(new) and is_floating(param)
    if both and param.dtype == old.dtype and bits(new.dtype) < bits(old.dtype):
        raise ValueError(
            f"{where} is {describe(new)}, and the param {describe(param)} is in the "
            f"dtype of the master {describe(old)}: they seem to be swapped; call "
            f"`{call}`, with the params in their training dtype."
        )


def match_stored(params: Leaves, state: MixedPrecisionState) -> list[Any]:
    """Return what a state stores for each param; absent where it stores nothing."""
    # Under `optax.partition` one `MaskedNode` can stand for a whole branch of params.
    stored = expand_absent(state.master_params, params.unflatten(params.values))
    return params.match_subtrees(stored, "the masters in `opt_state`")


def replace_stored(
    params: Leaves, state: MixedPrecisionState, values: list[Any]
) -> MixedPrecisionState:
    """Return `state` with other stored values, in the order of `match_stored`."""
    stored = jax.tree.map(
        lambda old, new: old if is_absent(old) else new,
        state.master_params,
        params.unflatten(values),
        is_leaf=is_absent,
    )
    return state._replace(master_params=stored)


def decode_master(storage: Storage, stored: Any, param: Any, where: str) -> jax.Array:
    """Return the master of a param; `where` names the caller and the param."""
    if storage.param_is_part:
        check_takes_param(storage, param, where)
    # `zero1` shards what is stored, and not the params.
    master = storage.decode(bring(stored), reshard_beside(param, stored))
    if master.shape != jnp.shape(param):
        raise ValueError(
            f"{where} is {describe(param)}, but its master is {describe(master)}, "
            "expected the same shape: the state belongs to other params."
        )
    return master


def check_takes_param(storage: Storage, param: Any, where: str) -> None:
    """Raise unless `storage` takes the dtype of a param that is part of its master."""
    master_dtype = jnp.dtype(jnp.float32)
    if is_floating(param) and storage.takes(param.dtype, master_dtype):
        return
    expected = list_taken_dtypes(storage, master_dtype)
    raise ValueError(
        f"{where} is {describe(param)}, expected {expected}, since with {storage} the "
        "param is part of its master. Pass the params in their training dtype: cast "
        "them with `Policy.cast_to_param` or `optax_mp.cast_floating`."
    )


def _like_old_master(new: Any, old: jax.Array, where: str) -> jax.Array:
    """Return a copy of a new master with the dtype and sharding of the old one."""
    if not is_floating(new):
        raise TypeError(
            f"{where} is {describe(new)}, expected a floating array like the master "
            f"{describe(old)}."
        )
    if new.shape != old.shape:
        raise ValueError(
            f"{where} is {describe(new)}, expected the shape of the master "
            f"{describe(old)}."
        )
    if not is_traced(old):
        new = jax.device_put(new, old.sharding)
    return jnp.array(new, old.dtype, copy=True)


def _check_param_is_rounded(storage: Storage, new: Any, param: Any, where: str) -> None:
    """Raise unless `param` is the new master rounded; traced values go unchecked."""
    if is_traced(new) or is_traced(param):
        return
    value = param.astype(new.dtype)
    # The storage may round ties differently from a cast: accept both.
    _, target = storage.advance(storage.encode(new, param), param, new)
    is_rounded = (value == target) | (value == round_to(new, param.dtype))
    is_rounded |= jnp.isnan(value) & jnp.isnan(new)
    if not bool(is_rounded.all()):
        raise ValueError(
            f"{where} is {describe(new)}, and the param {describe(param)} in `params` "
            f"is not this master rounded, as {storage} requires, because the param is "
            "part of the master. Cast first, with `new_params = "
            "policy.cast_to_param(new_master)`; then call "
            "`replace_master_params(opt_state, new_params, new_master)` and continue "
            "with `new_params`."
        )


def _widen(leaf: Any) -> Any:
    """Return a floating leaf in float32, if it is not as wide already."""
    return leaf.astype(at_least_float32(leaf.dtype)) if is_floating(leaf) else leaf
