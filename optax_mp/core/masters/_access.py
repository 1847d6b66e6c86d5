"""Read, replace and update masters, at any depth of an optimizer state."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays
from optax_mp.core.masters import _storage
from optax_mp.core.masters._edits import follow_edits
from optax_mp.core.masters._settings import check_shape
from optax_mp.core.trees import _states, _tree
from optax_mp.core.trees._boxes import boxed_like, plain_trees
from optax_mp.core.trees._leaves import Leaves, is_absent
from optax_mp.core.wrappers._mistakes import check_nesting, check_state_first


def master_params(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Return the params in high precision: the masters, at any depth of the state.

    Evaluate, average and export these as the weights. Leaves without a master are those
    of `params`. If the state holds no masters at all, floating params are returned in
    float32, or in their own dtype if that is wider, so that one script serves every
    precision.

    Masters that `offload` keeps in host memory are all copied to device memory, 4 bytes
    per weight. If that is too much, compute them on the host's CPU, from NumPy arrays:
    `with jax.default_device(jax.devices("cpu")[0]):
    master_params(*jax.device_get((opt_state, params)))`.

    Args:
        opt_state: any optimizer state, with `mixed_precision` at any depth of wrappers
            or without. Under `optax.partition` it may hold several, each with some of
            the leaves. An `nnx.Optimizer` is also accepted.
        params: the current params, or the `nnx.Module` that the optimizer trains.

    Returns:
        A tree like `params`, each leaf `[...]` in the dtype of its master; for NNX an
        `nnx.State` of arrays, for `nnx.update`. It shares no array with `opt_state` or
        `params`, so both can be donated to the next step: outside of `jit` all arrays
        are copies.

    Raises:
        TypeError: if `opt_state` is not an optimizer state, or is the second argument.
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
    opt_state, params, leaves = read_arguments(opt_state, params, caller)
    if not _states.find_states(opt_state, _storage.MixedPrecisionState):
        _states.check_classes(opt_state, caller)
        return _tree.copy_shared(_tree.in_float32(params), params)
    weights = leaves.unflatten(weights_of(opt_state, leaves))
    return _tree.copy_shared(weights, (opt_state, params))


def weights_of(opt_state: Any, params: Leaves) -> list[Any]:
    """Return the weights: for each param its master, or itself if it has none."""
    weights = list(params.values)
    states = [
        state
        for _, state in _states.find_states(opt_state, _storage.MixedPrecisionState)
    ]
    for i, _, _, master in decode_all(params, states):
        weights[i] = master
    return weights


def read_arguments(
    opt_state: Any, params: Any, caller: str, names: str = "opt_state, params"
) -> tuple[Any, Any, Leaves]:
    """Return state and params without NNX's boxes, and the leaves of the params.

    Raises if they are swapped, or if the order of the transforms does not work.
    """
    opt_state, params = plain_trees(opt_state, params)
    check_state_first(opt_state, params, caller, f"{caller}({names})")
    check_nesting(opt_state, caller)
    return opt_state, params, Leaves.of(params, caller=caller)


def decode_all(
    params: Leaves, states: Sequence[_storage.MixedPrecisionState]
) -> Iterator[tuple[int, _storage.Storage, Any, jax.Array]]:
    """Yield (index of the param, storage, what is stored, master) for each master."""
    for state in states:
        storage = _storage.storage_of(state, params.caller)
        matched = params.match(state.master_params, "the masters in `opt_state`")
        for i, stored in enumerate(matched):
            if not is_absent(stored):
                yield i, storage, stored, _decode(storage, stored, params, i)


def replace_master_params(
    opt_state: optax.OptState, params: optax.Params, new_master: optax.Params
) -> optax.OptState:
    """Return `opt_state` with new masters, such as weights loaded after `init`.

    The rest of the state is unchanged. `params` must be the new masters, cast: a param
    that differs from its rounded master counts as edited, and the next step would
    follow it. Outside of `jit` such params are an error. A leaf that is its own master
    is replaced in `params` alone. New masters take the sharding of the old ones.

    Args:
        opt_state: a state with `mixed_precision` in it, at any depth of wrappers.
        params: the params to continue with, such as `Policy.cast_to_param(new_master)`.
        new_master: a tree like `params`, in any floating dtype.

    Returns:
        The new state. It shares no buffer with `new_master`.

    Raises:
        ValueError: if the state holds no `MixedPrecisionState`, if a structure or shape
            differs, if a new master is not floating, or if a param differs from its
            rounded new master.
        TypeError: if `opt_state` is not an optimizer state, or is not the first
            argument.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = optax_mp.mixed_precision(optax.sgd(0.1)).init(params)
        >>> loaded = {"w": jnp.array([1.001, 2.002])}
        >>> params = optax_mp.get_policy("bf16").cast_to_param(loaded)
        >>> state = optax_mp.replace_master_params(state, params, loaded)
        >>> optax_mp.master_params(state, params)["w"].tolist() == loaded["w"].tolist()
        True
    """
    caller = "replace_master_params"
    given = opt_state
    new_master = plain_trees(opt_state, new_master)[1]
    names = "opt_state, params, new_master"
    opt_state, params, leaves = read_arguments(opt_state, params, caller, names)
    if not _states.find_states(opt_state, _storage.MixedPrecisionState):
        raise ValueError(
            f"{caller}: expected `opt_state` of `optax_mp.mixed_precision`, got one "
            "without a MixedPrecisionState; replace `params` alone."
        )
    new_leaves = leaves.match(new_master, "`new_master`")

    def replace(i: int, storage: _storage.Storage, old: jax.Array) -> jax.Array:
        where = f"{caller}: expected `new_master` at {_tree.spell(leaves.paths[i])}"
        new = new_leaves[i]
        if not _dtypes.is_floating(new) or new.shape != old.shape:
            raise ValueError(
                f"{where} to be a floating array of the shape of the master "
                f"{_arrays.describe(old)}, got {_arrays.describe(new)}."
            )
        new = jnp.array(put_beside(new, old), old.dtype, copy=True)
        remedy = (
            "pass `policy.cast_to_param(new_master)` as `params`, and continue with it."
        )
        check_param_is_rounded(storage, new, leaves.values[i], where, remedy)
        return new

    return boxed_like(given, _as_exact(map_masters(replace, opt_state, leaves)))


def follow_params(opt_state: optax.OptState, params: optax.Params) -> optax.OptState:
    """Return `opt_state` with masters that follow edits of the params.

    A projection, a pruning mask, an averaging of replicas or a checkpoint may change
    params between two steps. After float32 updates (of float32 gradients, or with
    `update_dtype=jnp.float32`), and before the first step, the next step takes an
    edited param as its master. So call this function only

    - after 16-bit updates. The next step cannot tell an edit from a rounding, and would
      undo it;
    - before `master_params`, if no step comes first.

    Each finite element of a param that differs from its rounded master becomes the new
    master. After 16-bit updates a few elements in a thousand differ by a rounding;
    their masters are also rounded. `Split` and `stochastic_rounding` follow edits by
    themselves. Such states, and those without masters, are returned unchanged.

    Args:
        opt_state: any optimizer state, with `mixed_precision` at any depth of wrappers
            or without; or an `nnx.Optimizer`.
        params: the params after the edit, or the `nnx.Module`.

    Returns:
        The new state. It can be computed under `jit`.

    Raises:
        TypeError: if `opt_state` is not an optimizer state, or is not the first
            argument.
        ValueError: if the state belongs to other params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = optax_mp.mixed_precision(optax.sgd(0.1)).init(params)
        >>> params = {"w": params["w"] / 2}
        >>> state = optax_mp.follow_params(state, params)
        >>> optax_mp.master_params(state, params)["w"].tolist()
        [0.5, 0.5]
    """
    caller = "follow_params"
    given = opt_state
    opt_state, params, leaves = read_arguments(opt_state, params, caller)

    def follow(i: int, storage: _storage.Storage, old: jax.Array) -> jax.Array | None:
        if storage.param_is_part:
            return None
        return follow_edits(old, put_beside(leaves.values[i], old))

    return boxed_like(given, _as_exact(map_masters(follow, opt_state, leaves)))


def map_masters(
    change: Callable[[int, _storage.Storage, jax.Array], jax.Array | None],
    opt_state: optax.OptState,
    params: Leaves,
) -> optax.OptState:
    """Return `opt_state` with other masters.

    Args:
        change: from the index of a param, the storage and the old master `[...]` to the
            new one, of the same shape and dtype, or to None for no change.
        opt_state: a state.
        params: its params.
    """

    def map_state(state: _storage.MixedPrecisionState) -> _storage.MixedPrecisionState:
        new_stored: list[Any] = [optax.MaskedNode()] * len(params.values)
        for i, storage, stored, old in decode_all(params, [state]):
            new_stored[i] = stored
            new = change(i, storage, old)
            if new is not None:
                # As `zero1` shards what is stored, and not the params.
                pair = (
                    _arrays.with_sharding_of(x, stored) for x in (new, params.values[i])
                )
                new_stored[i] = _arrays.with_memory_of(storage.encode(*pair), stored)
        # Of its own structure: one `MaskedNode` may stand for a branch of params.
        master_params = jax.tree.map(
            lambda old, new: old if is_absent(old) else new,
            state.master_params,
            params.unflatten(new_stored),
            is_leaf=is_absent,
        )
        return state._replace(master_params=master_params)

    return _states.map_states(map_state, opt_state, _storage.MixedPrecisionState)


def _as_exact(opt_state: optax.OptState) -> optax.OptState:
    """Return a state with `last_exact` True: each param is its rounded master."""

    def as_exact(state: _storage.MixedPrecisionState) -> _storage.MixedPrecisionState:
        is_exact = jax.tree.map(lambda x: x | True, state.last_exact)
        return state._replace(last_exact=is_exact)

    return _states.map_states(as_exact, opt_state, _storage.MixedPrecisionState)


def put_beside(x: Any, old: jax.Array) -> jax.Array:
    """Return `x` `[...]` with the sharding of the master `old` `[...]`."""
    if _arrays.is_traced(old):
        return _arrays.reshard_like(jnp.asarray(x), old)
    return jax.device_put(x, old.sharding)


def _decode(
    storage: _storage.Storage, stored: Any, params: Leaves, i: int
) -> jax.Array:
    """Return the master of a param, in device memory."""
    param = params.values[i]
    where = f"{params.caller}: expected param {_tree.spell(params.paths[i])}"
    check_shape(where, param, stored)
    if storage.param_is_part:
        _storage.check_part(where, storage, param)
    return storage.decode(
        _arrays.to_device_tree(stored), _arrays.with_sharding_of(param, stored)
    )


def check_param_is_rounded(
    storage: _storage.Storage, new: Any, param: Any, where: str, remedy: str
) -> None:
    """Raise unless `param` is the new master rounded; traced values go unchecked."""
    if _arrays.is_traced(new) or _arrays.is_traced(param):
        return
    param = put_beside(param, new)
    # The storage may round ties differently from a cast: accept both.
    _, target = storage.advance(storage.encode(new, param), param, new)
    value, rounded = param.astype(new.dtype), _dtypes.round_to(new, param.dtype)
    # Cast, because `target` has the dtype of the param with `Split`.
    is_right = (value == target.astype(new.dtype)) | (value == rounded)
    is_right |= jnp.isnan(value) & jnp.isnan(new)
    if not storage.param_is_part:
        is_right |= ~jnp.isfinite(value)  # no edit, as `follow_edits` says
    if not bool(is_right.all()):
        raise ValueError(
            f"{where} to round to the param, as {storage} requires, got "
            f"{_arrays.describe(new)}, which does not round to "
            f"{_arrays.describe(param)}; {remedy}"
        )
