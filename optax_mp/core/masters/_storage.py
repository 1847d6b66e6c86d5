"""How a master is kept between steps, and the state of `mixed_precision`.

`FullCopy` keeps the master itself, `Split` only what its param lacks. Both storages
have the same methods, which work leaf by leaf. `encode` returns what is stored for a
master, and `decode` the master again. `advance` returns what is stored after a step,
and the value that the param moves to. `takes` says which params a storage is for.

All arrays of these methods are `[...]`. A master is floating, its param floating and
narrower. What `FullCopy` stores has the dtype of the master; what `Split` stores is
int16 or int8. The `key` of `advance` is uint32 `[1]`.

The storage is part of the state's type, so that everything that reads a state
(`master_params`, `convert_opt_state`, `memory_report`, ...) asks the state's own
storage and never guesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_mp.core import _dtypes
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.masters._split import Split
from optax_mp.core.trees import _states, _tree
from optax_mp.core.trees._leaves import Leaves, is_absent
from optax_mp.core.trees._typed import type_with


@dataclass(frozen=True)
class FullCopy:
    """Keep a copy of every master: 4 bytes per weight for float32 masters.

    The default. It loses nothing, for any `master_dtype` and for params of any floating
    dtype. If you edit a param outside of the optimizer, it is the new master in the
    next step; after 16-bit updates call `follow_params`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.FullCopy())
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> state.master_params["w"].dtype.name, state.master_params["w"].nbytes
        ('float32', 8)
    """

    param_is_part = False  # what is stored is the master itself
    is_random = False

    def takes(self, param_dtype: jnp.dtype, master_dtype: jnp.dtype) -> bool:
        """Return whether the param is narrower than the master."""
        return _dtypes.bits(param_dtype) < _dtypes.bits(master_dtype)

    def encode(self, master: jax.Array, param: jax.Array) -> jax.Array:
        """Return the master itself."""
        return master

    def decode(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        """Return the stored master."""
        return stored

    def advance(
        self,
        stored: jax.Array,
        param: jax.Array,
        master: jax.Array,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the new master twice: to store it, and to round the param from it."""
        return master, master


Storage = FullCopy | Split
# The params that `Split` takes.
_HALF = "bfloat16 or float16"


@_states.own_state
class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Its structure, shapes and dtypes are the same at `init` and after every update, so
    it can be the carry of a `jax.lax.scan` and the template of a checkpoint.

    The storage is part of the state's type: `type(state)` is a subclass of this one,
    and states of two storages have different tree structures. So no function has to
    guess how masters are kept, and `jax.tree.map` over two such states is an error.

    Attributes:
        master_params: a tree like the params, with what the storage keeps of each
            leaf's master, `[...]`: the master with `FullCopy`, an int16 or int8
            remainder with `Split`. `optax.MaskedNode()` for each leaf that is its own
            master.
        inner_state: the state of the inner optimizer, over masters. Its public fields,
            such as `hyperparams`, are also attributes of this state.
        last_exact: bool `[]`, whether the last updates were exact, as float32 updates
            of 16-bit params are. Each param is then its rounded master; if it differs,
            it was edited. None for `Split`, with which the param is a part of its
            master.
        step_count: int32 `[]`, the number of steps that were taken. `Split(8)` rounds
            at random, with its own random numbers in each step. None for the other
            storages.
        storage: the storage that made the state; a class attribute, not a leaf. None
            for a state that was built by hand.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
        >>> state = optax_mp.mixed_precision(optax.sgd(0.1)).init(params)
        >>> state.master_params["w"].dtype.name, state.master_params["norm"]
        ('float32', MaskedNode())
        >>> state.storage
        FullCopy()
    """

    master_params: optax.Params
    inner_state: optax.OptState
    last_exact: jax.Array | None = None
    step_count: jax.Array | None = None
    # Not annotated: an annotation would make a field of it, and so a leaf.
    storage = None
    __getattr__ = _states.inner_field


def state_type(storage: Storage) -> type[MixedPrecisionState]:
    """Return the type of states that a storage makes, the same for equal storages."""
    return type_with(MixedPrecisionState, "storage", storage)


def storage_of(state: MixedPrecisionState, caller: str) -> Storage:
    """Return the storage of a state; raise for a state that was built by hand."""
    if state.storage is None:
        raise ValueError(
            f"{caller}: expected a state that `init` returned, got one that does not "
            "say which storage made it; change states with `state._replace(...)`."
        )
    return state.storage


def counter_of(state: MixedPrecisionState, caller: str) -> jax.Array | None:
    """Return `step_count`, int32 `[]`, or None if the storage does not need it.

    Raise if the storage rounds at random, and the state has no count.
    """
    is_missing = storage_of(state, caller).is_random and state.step_count is None
    if is_missing:
        raise ValueError(
            f"{caller}: expected a state with `step_count`, since {state.storage} "
            "rounds at random, got None; pass "
            "`state._replace(step_count=jnp.int32(0))`."
        )
    return state.step_count


def check_storage(
    storage: Any, master_dtype: jnp.dtype, update_dtype: jnp.dtype | str | None
) -> None:
    """Raise unless `storage` is a storage, and works with the dtypes."""
    if not isinstance(storage, Storage):
        raise TypeError(
            "mixed_precision: expected `storage` to be `optax_mp.FullCopy()` or "
            f"`optax_mp.Split(bits=16)`, got {storage!r}."
        )
    if isinstance(storage, FullCopy):
        return
    if master_dtype != jnp.float32:
        raise ValueError(
            "mixed_precision: expected `master_dtype` to be float32 with the storage "
            f"{storage}, got {master_dtype}; use `optax_mp.FullCopy()`."
        )
    if update_dtype is not None and update_dtype != jnp.float32:
        raise ValueError(
            "mixed_precision: expected `update_dtype` to be float32 or None with the "
            f"storage {storage}, got {update_dtype}; use `optax_mp.FullCopy()`."
        )


def check_storable(
    storage: Storage, where: str, dtype: jnp.dtype, master_dtype: jnp.dtype
) -> None:
    """Raise unless `storage` can keep the master of a param.

    Args:
        storage: a storage.
        where: the param in words.
        dtype: its dtype in training.
        master_dtype: the dtype of masters.
    """
    if float(jnp.finfo(dtype).min) > 0:
        raise ValueError(
            f"mixed_precision: expected {where} to have a dtype of weights, got "
            f"{dtype}, without sign and zero; if it is not trained, use `optax.masked`."
        )
    if not storage.takes(dtype, master_dtype):
        raise ValueError(
            f"mixed_precision: expected {where} to be {_HALF} in training with the "
            f"storage {storage}, got {dtype}; use `optax_mp.FullCopy()` for it."
        )


def check_part(where: str, storage: Storage, param: Any) -> None:
    """Raise unless a param can be a part of its master, where the storage needs that.

    Args:
        where: what is expected of which param, in words.
        storage: a storage.
        param: the param, an array.
    """
    if not storage.takes(param.dtype, jnp.dtype(jnp.float32)):
        raise ValueError(
            f"{where} in {_HALF}, since with {storage} it is part of its master, got "
            f"{_arrays.describe(param)}; cast the params with `Policy.cast_to_param`."
        )


def warn_unless_stored(storage: Storage, params: Leaves, stored: Sequence[Any]) -> None:
    """Warn if `Split` stores nothing.

    A float32 leaf among others is its own master. If all leaves are, the params may not
    have been cast. This is not an error, because one factory may make optimizers for
    several models.
    """
    inexact = [i for i, param in enumerate(params.values) if _dtypes.is_inexact(param)]
    if storage.param_is_part and inexact and all(map(is_absent, stored)):
        path, param = params.paths[inexact[0]], params.values[inexact[0]]
        warn(
            f"mixed_precision: the storage {storage} stores nothing, because no param "
            f"is {_HALF} (param {_tree.spell(path)} is {_arrays.describe(param)}); "
            "cast the params before `init`, or pass `param_dtype`."
        )
