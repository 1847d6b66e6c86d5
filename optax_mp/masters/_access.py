"""Reading and replacing masters, wherever a state holds them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_mp._dtypes import round_to
from optax_mp._jax._arrays import is_traced
from optax_mp._leaves import Leaves, is_absent
from optax_mp._states import find_states, map_states
from optax_mp._tree import describe, is_floating, place
from optax_mp.masters.storage._contract import Storage, check_carrier, storage_of


class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Its structure, shapes and dtypes are the same at `init` and after every update, so
    it can be the carry of a `jax.lax.scan` and the template of a checkpoint.

    Attributes:
        master_params: a tree like the params, with the stored master of each leaf that
            has one and `optax.MaskedNode()` for each leaf that is its own master.
        inner_state: the state of the inner optimizer, over masters.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
        >>> state = optax_mp.mixed_precision(optax.sgd(0.1)).init(params)
        >>> state.master_params["w"].dtype.name, state.master_params["norm"]
        ('float32', MaskedNode())
    """

    master_params: optax.Params
    inner_state: optax.OptState


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
    result = params
    for state in _states_of(opt_state, "master_params"):
        leaves = _masters_of(state, "master_params")
        now = leaves.match(params, "`params`")
        so_far = leaves.match(result, "`params`")
        result = leaves.unflatten(
            before if is_absent(kept) else _decoded(kept, param, path, "master_params")
            for path, kept, param, before in zip(
                leaves.paths, leaves.values, now, so_far, strict=True
            )
        )
    return result


def replace_master_params(
    opt_state: optax.OptState, params: optax.Params, new_master: optax.Params
) -> optax.OptState:
    """Return `opt_state` with other masters, such as weights loaded after `init`.

    Everything else in the state stays. The next update moves finite params to the new
    masters; to have them there before, cast: `Policy.cast_to_param(new_master)`. With
    `Split`, whose masters are the params and what they lack, `params` must be those new
    ones (outside of `jit` it is an error if they are not). Leaves
    that are their own master live in the params alone, so set those there. New masters
    take the sharding of the old.

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
    _states_of(opt_state, "replace_master_params")

    def replaced(path: Any, kept: Any, param: Any, new: Any) -> Any:
        if is_absent(kept):
            return kept
        storage = storage_of(kept)
        old = _decoded(kept, param, path, "replace_master_params")
        where = f"replace_master_params: `new_master` at {place(path)}"
        if not is_floating(new):
            raise TypeError(
                f"{where} is {describe(new)}, expected a floating array like the "
                f"master {describe(old)}."
            )
        if new.shape != old.shape:
            raise ValueError(
                f"{where} is {describe(new)}, expected the shape of the master "
                f"{describe(old)}."
            )
        if not is_traced(old):
            new = jax.device_put(new, old.sharding)
        new = jnp.array(new, old.dtype, copy=True)
        encoded = storage.encode(new, param, param.dtype)
        if encoded is not new:
            _check_carried(storage, new, param, where)
        return encoded

    def in_state(node: MixedPrecisionState) -> MixedPrecisionState:
        leaves = _masters_of(node, "replace_master_params")
        now = leaves.match(params, "`params`")
        given = leaves.match(new_master, "`new_master`")
        masters = map(replaced, leaves.paths, leaves.values, now, given)
        return node._replace(master_params=leaves.unflatten(masters))

    return map_states(in_state, opt_state, MixedPrecisionState)


def _decoded(kept: Any, param: Any, path: tuple[Any, ...], caller: str) -> jax.Array:
    """Return the master of a param."""
    storage = storage_of(kept)
    check_carrier(storage, param, f"{caller}: param {place(path)}")
    return storage.decode(kept, param, param.dtype)


def _check_carried(storage: Storage, new: Any, param: Any, where: str) -> None:
    """Raise if `param` is not what `new` is rounded to; traced values go unchecked."""
    if is_traced(new) or is_traced(param):
        return
    value = param.astype(new.dtype)
    # Rounded by the storage, or by a cast: they differ in ties.
    carries = (value == storage.round(new, param.dtype)) | (
        value == round_to(new, param.dtype)
    )
    # An infinite param or NaN is its own master.
    if not bool((carries | ~jnp.isfinite(value)).all()):
        raise ValueError(
            f"{where} is {describe(new)}, and its param in `params` {describe(param)} "
            f"is not what it is rounded to, expected that with {storage}, which keeps "
            "only what the param lacks. Cast first, with `new_params = "
            "optax_mp.cast_floating(new_master, ...)`; then call "
            "`replace_master_params(opt_state, new_params, new_master)` and go on with "
            "`new_params`."
        )


def _masters_of(state: MixedPrecisionState, caller: str) -> Leaves:
    # Under `optax.partition` one `MaskedNode` can stand for a whole branch of params.
    return Leaves.of(
        state.master_params,
        caller=caller,
        name="the masters in `opt_state`",
        absent_too=True,
    )


def _states_of(opt_state: optax.OptState, caller: str) -> list[MixedPrecisionState]:
    found = [state for _, state in find_states(opt_state, MixedPrecisionState)]
    if not found:
        raise ValueError(
            f"{caller}: `opt_state` holds no MixedPrecisionState, expected the state "
            "of an optimizer with optax_mp.mixed_precision in it; without one, the "
            "params are all that there is."
        )
    return found
