"""The storage interface: how a master is kept between steps. And the states.

A storage is a frozen, hashable object. It is part of the type of the optimizer state,
so that everything that reads a state (`master_params`, `convert_opt_state`,
`memory_report`, ...) asks the state's own storage and never guesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from optax_mp._dtypes import bits
from optax_mp._warnings import warn
from optax_mp.trees._leaves import Leaves, is_absent
from optax_mp.trees._states import inner_field
from optax_mp.trees._tree import (
    PyTree,
    copy_shared,
    describe,
    ends_in,
    is_array,
    is_floating,
    is_inexact,
    spell,
)
from optax_mp.trees._typed import type_with

# The hash, because a storage becomes part of the state's type.
_MEMBERS = ("takes", "encode", "decode", "advance", "param_is_part", "__hash__")
# The param dtypes that errors mention if a storage takes them.
_DTYPES = """
bfloat16 float16 float32 float8_e4m3fn float8_e5m2 float4_e2m1fn
float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz
""".split()


class Storage(Protocol):
    """How the masters of some params are kept in the optimizer state.

    Write a frozen dataclass with these members, and give an instance of it to
    `mixed_precision(..., storage=...)`. It works leaf by leaf and must only use
    operations that JAX can trace.

    Example:
        >>> import dataclasses
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> @dataclasses.dataclass(frozen=True)
        ... class Negated:
        ...     param_is_part = False
        ...     def takes(self, param_dtype, master_dtype):
        ...         return master_dtype == jnp.float32
        ...     def encode(self, master, param):
        ...         return -master
        ...     def decode(self, stored, param):
        ...         return -stored
        ...     def advance(self, stored, param, master):
        ...         return -master, master
        >>> tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=Negated())
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> state.master_params["w"].tolist()
        [-1.0, -1.0]
        >>> optax_mp.master_params(state, params)["w"].tolist()
        [1.0, 1.0]
    """

    @property
    def param_is_part(self) -> bool:
        """Whether `decode` reads the param: both together are the master.

        Updates are then always float32, so that params reach their targets exactly, and
        functions that read masters require params in a dtype that the storage takes.
        """
        ...

    def takes(self, param_dtype: jnp.dtype, master_dtype: jnp.dtype) -> bool:
        """Return whether masters of `master_dtype` can be kept for such params."""
        ...

    def encode(self, master: jax.Array, param: jax.Array) -> PyTree:
        """Return what is stored for `master`, beside `param`.

        One array, or a small pytree of arrays, whose last axes are the param's: only
        then can they be sharded as the param is. For `param == round(master)`,
        `decode` gives the master back, as precisely as the storage promises.
        """
        ...

    def decode(self, stored: PyTree, param: jax.Array) -> jax.Array:
        """Return the master."""
        ...

    def advance(
        self, stored: PyTree, param: jax.Array, master: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Return (stored, target) for a step that brings the master to `master`.

        If the storage has an attribute `is_random` that is True, it is also given a
        key, for `uniform_numbers`.

        `stored` and `param` are those before the step. The param moves to `target`,
        rounded to its dtype if that is another. The new `stored` has the structure,
        shapes and dtypes of the old one. Unless `param_is_part`, it must decode to a
        master that rounds to the same param: any other param counts as edited.
        """
        ...


@dataclass(frozen=True)
class FullCopy:
    """Keep every master as it is: 4 bytes per weight for float32 masters.

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
        return bits(param_dtype) < bits(master_dtype)

    def encode(self, master: jax.Array, param: jax.Array) -> jax.Array:
        """Return the master itself."""
        return master

    def decode(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        """Return the stored master."""
        return stored

    def advance(
        self, stored: jax.Array, param: jax.Array, master: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the new master twice: to store it, and to round the param from it."""
        return master, master


class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Its structure, shapes and dtypes are the same at `init` and after every update, so
    it can be the carry of a `jax.lax.scan` and the template of a checkpoint.

    The storage is part of the state's type: `type(state)` is a subclass of this one,
    and states of two storages have different tree structures. So no function has to
    guess how masters are kept, and `jax.tree.map` over two such states is an error.

    Attributes:
        master_params: a tree like the params, with the stored form of each leaf's
            master, and `optax.MaskedNode()` for each leaf that is its own master.
        inner_state: the state of the inner optimizer, over masters. Its public fields,
            such as `hyperparams`, are also attributes of this state.
        last_exact: bool scalar, whether the last updates were exact, as all but those
            of 16 or 8 bits are. Then each param is its rounded master, and one that is
            not was edited. None for `Split` and the like: the param is a part of its
            master.
        step_count: int32 scalar, the number of steps that were taken, for a storage
            that rounds at random, such as `Split(8)`: each step has its own random
            numbers. None for others.
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
    __getattr__ = inner_field


class AverageState(NamedTuple):
    """State of `with_average`.

    Its structure, shapes and dtypes never change.

    Attributes:
        average: a tree like the params: float32 for each floating leaf of 32 bits or
            fewer, in the leaf's shape; `optax.MaskedNode()` for integers, bools, keys.
        step_count: int32 scalar, the number of steps that were taken.
        inner_state: the state of the inner optimizer. Its public fields, such as
            `hyperparams`, are also attributes of this state.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.with_average(optax.adam(1e-3), decay=0.999)
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> state.average["w"].dtype.name, int(state.step_count)
        ('float32', 0)
    """

    average: optax.Params
    step_count: jax.Array
    inner_state: optax.OptState
    __getattr__ = inner_field


def state_type(storage: Storage) -> type[MixedPrecisionState]:
    """Return the type of states that a storage makes, the same for equal storages."""
    return type_with(MixedPrecisionState, "storage", storage)


def is_random(storage: Storage) -> bool:
    """Return whether a storage rounds at random."""
    return getattr(storage, "is_random", False)


def counter_of(state: MixedPrecisionState, caller: str) -> jax.Array | None:
    """Return the counter of a state whose storage rounds at random, or raise.

    None for other storages.
    """
    is_missing = is_random(storage_of(state, caller)) and state.step_count is None
    if is_missing:
        raise ValueError(
            f"{caller}: expected a state with `step_count`, since {state.storage} "
            "rounds at random, got None, as 1.0.0 or a development version made it; "
            "pass `state._replace(step_count=jnp.int32(0))`."
        )
    return state.step_count


def storage_of(state: MixedPrecisionState, caller: str) -> Storage:
    """Return the storage of a state; raise for a state that was built by hand."""
    if state.storage is None:
        raise ValueError(
            f"{caller}: expected a state that `init` returned, got one that does not "
            "say which storage made it; change a state with `state._replace(...)`."
        )
    return state.storage


def check_storage(
    storage: Any, master_dtype: jnp.dtype, update_dtype: jnp.dtype | str | None
) -> None:
    """Raise unless `storage` has the members of `Storage` and works with the dtypes."""
    missing = [name for name in _MEMBERS if getattr(storage, name, None) is None]
    lack = f"has no `{'`, `'.join(missing)}`" if missing else ""
    if lack or isinstance(storage, type):
        raise TypeError(
            "mixed_precision: expected `storage` to be an object such as "
            f"`optax_mp.FullCopy()`, got {storage!r}, which {lack or 'is a class'}; "
            "pass a frozen dataclass with all members of `optax_mp.masters.Storage`."
        )
    if not list_taken_dtypes(storage, master_dtype):
        raise ValueError(
            "mixed_precision: expected `master_dtype` to be float32 with the storage "
            f"{storage}, got {master_dtype}; use `optax_mp.FullCopy()`."
        )
    is_exact = update_dtype is None or update_dtype == jnp.float32
    if storage.param_is_part and not is_exact:
        raise ValueError(
            "mixed_precision: expected `update_dtype` to be float32 or None with the "
            f"storage {storage}, which needs exact updates, got {update_dtype}; use "
            "`optax_mp.FullCopy()`."
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
            f"{dtype}, which has neither a sign nor zero; wrap the optimizer in "
            "`optax.masked` if it is not trained."
        )
    if not storage.takes(dtype, master_dtype):
        raise ValueError(
            f"mixed_precision: expected {where} to be "
            f"{list_taken_dtypes(storage, master_dtype)} in training with the storage "
            f"{storage}, got {dtype}; use `optax_mp.FullCopy()` for it."
        )


def warn_unless_stored(
    storage: Storage, params: Leaves, stored: Sequence[Any], master_dtype: jnp.dtype
) -> None:
    """Warn if a storage such as `Split` stores nothing.

    A float32 leaf among others is its own master. If all leaves are, the params may not
    have been cast. It is no error: one factory may make optimizers for several models.
    """
    inexact = [i for i, param in enumerate(params.values) if is_inexact(param)]
    if storage.param_is_part and inexact and all(map(is_absent, stored)):
        path, param = params.paths[inexact[0]], params.values[inexact[0]]
        warn(
            f"mixed_precision: the storage {storage} stores nothing, because no param "
            f"is {list_taken_dtypes(storage, master_dtype)} (param {spell(path)} is "
            f"{describe(param)}): each param is its own master. To train in 16 bits, "
            "cast the params before `init`, or pass `param_dtype` and cast them later."
        )


def list_taken_dtypes(storage: Storage, master_dtype: jnp.dtype) -> str:
    """Return the param dtypes that a storage takes, as error messages list them."""
    taken = [d for d in _DTYPES if storage.takes(jnp.dtype(d), master_dtype)]
    return " or ".join(taken)


def store(
    storage: Storage, master: jax.Array, param: jax.Array, where: str
) -> tuple[PyTree, jax.Array]:
    """Return what is stored for a first master, and the master that it decodes to.

    Raises:
        TypeError: if a method of the storage returns what its contract excludes.
    """

    def check(is_right: bool, method: str, returned: Any, expected: str) -> None:
        if not is_right:
            arrays = jax.tree.leaves(returned) or [returned]
            raise TypeError(
                f"mixed_precision: expected `{method}` of the storage {storage} to "
                f"return {expected} for {where}, which is {describe(param)}, got "
                f"{', '.join(map(describe, arrays))}."
            )

    stored = storage.encode(master, param)
    leaves = jax.tree.leaves(stored, is_leaf=is_absent)
    fits = all(is_array(x) and ends_in(x, param.shape) for x in leaves)
    own_axes = "arrays whose last axes match the param's, or an empty tuple"
    check(fits, "encode", stored, own_axes)
    stored = as_own_arrays(stored)
    decoded = storage.decode(stored, param)
    is_master = describe(decoded) == describe(master)
    check(is_master, "decode", decoded, f"{describe(master)}, as `encode` was given")
    key = [jax.ShapeDtypeStruct((1,), jnp.uint32)] if is_random(storage) else []
    advanced, target = jax.eval_shape(storage.advance, stored, param, master, *key)
    is_stable = _types(advanced) == _types(stored)
    check(is_stable, "advance", advanced, "the types that `encode` returns")
    is_target = is_floating(target) and target.shape == param.shape
    check(is_target, "advance", target, "a floating target of the shape of the param")
    return stored, decoded


def _types(tree: PyTree) -> Any:
    return jax.tree.structure(tree), [describe(x) for x in jax.tree.leaves(tree)]


def as_own_arrays(stored: PyTree) -> PyTree:
    """Return a tree whose arrays can be donated and have strong types.

    Weak types would not stay the same in the next step.
    """
    if isinstance(stored, jax.Array) and not stored.weak_type:
        return stored
    arrays = jax.tree.map(jnp.asarray, stored)
    return copy_shared(jax.tree.map(lambda x: jnp.asarray(x, x.dtype), arrays), ())
