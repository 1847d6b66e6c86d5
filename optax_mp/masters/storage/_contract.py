"""The contract of a storage: how a master is kept between steps.

A storage is a frozen, hashable object. It is part of the type of the optimizer state,
so that everything that reads a state (`master_params`, `convert_opt_state`,
`memory_report`, ...) asks the state's own storage and never guesses.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from optax_mp._dtypes import bits
from optax_mp._leaves import is_absent
from optax_mp._tree import PyTree, describe, is_array, is_floating

_METHODS = ("takes", "encode", "decode", "advance")
# The param dtypes that errors mention if a storage takes them.
_PARAM_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32")


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

        One array, or a small pytree of arrays, whose last axes are those of the param:
        only then can they be sharded as the param is. For `param == round(master)`,
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

        `stored` and `param` are those before the step. The param moves to `target`,
        rounded to its dtype if that is another. The new `stored` has the structure,
        shapes and dtypes of the old one. Unless `param_is_part`, it must decode to a
        master that rounds to the same param: any other param counts as edited.
        """
        ...


def check_storage(
    storage: Any, master_dtype: jnp.dtype, update_dtype: jnp.dtype | str | None
) -> None:
    """Raise unless `storage` has the members of `Storage` and works with the dtypes."""
    example = "such as `optax_mp.FullCopy()` or `optax_mp.Split(bits=16)`"
    if isinstance(storage, type):
        raise TypeError(
            f"mixed_precision: `storage` is the class {storage.__name__}, expected an "
            f"object {example}; call the class first."
        )
    missing = [name for name in _METHODS if not callable(getattr(storage, name, None))]
    missing += [] if hasattr(storage, "param_is_part") else ["param_is_part"]
    if missing:
        raise TypeError(
            f"mixed_precision: `storage` is {storage!r}, which has no "
            f"`{'`, `'.join(missing)}`; expected a storage object {example}, with all "
            "members of `optax_mp.masters.Storage`."
        )
    try:
        hash(storage)
    except TypeError as error:
        raise TypeError(
            f"mixed_precision: `storage` is {storage!r}, which is not hashable; "
            "expected a frozen dataclass, as it becomes part of the state's type."
        ) from error
    narrower = [d for d in _floats() if bits(d) < bits(master_dtype)]
    if not any(storage.takes(dtype, master_dtype) for dtype in narrower):
        raise ValueError(
            f"mixed_precision: `master_dtype` is {master_dtype}, which the storage "
            f"{storage} does not keep; expected float32, or use "
            "`optax_mp.FullCopy()`, which keeps any master."
        )
    is_exact = update_dtype is None or update_dtype == jnp.float32
    if storage.param_is_part and not is_exact:
        raise ValueError(
            f"mixed_precision: `update_dtype` is {update_dtype}, expected float32 or "
            f"None with the storage {storage}, which needs exact updates; use "
            "`optax_mp.FullCopy()` for updates in another dtype."
        )


def _floats() -> list[jnp.dtype]:
    """Return all dtypes that a float32 master can be rounded to, and float32."""
    small = [x for x in dir(jnp) if x.startswith(("float8_", "float4_"))]
    names = {*_PARAM_DTYPES, *small}
    return [jnp.dtype(getattr(jnp, name)) for name in sorted(names)]


def list_taken_dtypes(storage: Storage, master_dtype: jnp.dtype) -> str:
    """Return the param dtypes that a storage takes, as error messages list them."""
    taken = [d for d in _PARAM_DTYPES if storage.takes(jnp.dtype(d), master_dtype)]
    return " or ".join(taken) or "no param"


def as_stored(storage: Storage, stored: Any, param: jax.Array, where: str) -> PyTree:
    """Return what `encode` returned, in arrays of their own; raise if it is not kept.

    Only these can be donated, and only strong types stay the same in the next step.
    """
    leaves, treedef = jax.tree.flatten(stored)
    lasting = param.shape
    for leaf in leaves:
        fits = (
            is_array(leaf) and leaf.shape[max(0, leaf.ndim - param.ndim) :] == lasting
        )
        if not fits:
            raise TypeError(
                f"mixed_precision: `encode` of the storage {storage} returned "
                f"{describe(leaf)} for {where}, which is {describe(param)}, expected "
                "arrays whose last axes are those of the param."
            )
    if is_absent(stored):
        raise TypeError(
            f"mixed_precision: `encode` of the storage {storage} returned "
            f"{describe(stored)} for {where}, which stands for a param without a "
            "master; expected arrays, or an empty tuple where nothing is stored."
        )
    seen: set[int] = set()
    for i, leaf in enumerate(leaves):
        array = _strong(jnp.asarray(leaf))
        leaves[i] = jnp.array(array, copy=True) if id(array) in seen else array
        seen.add(id(leaves[i]))
    return treedef.unflatten(leaves)


def _strong(array: jax.Array) -> jax.Array:
    is_weak = getattr(array, "weak_type", False)
    return jnp.asarray(array, array.dtype) if is_weak else array


def check_target(storage: Storage, target: Any, param: jax.Array, where: str) -> None:
    """Raise unless a param can take the value that a storage says it is to take."""
    if not is_floating(target) or target.shape != param.shape:
        raise TypeError(
            f"mixed_precision: `advance` of the storage {storage} returned "
            f"{describe(target)} as the target for {where}, which is "
            f"{describe(param)}, expected a floating array of its shape."
        )


def as_advanced(storage: Storage, stored: Any, like: Any, where: str) -> PyTree:
    """Return what `advance` says to store; raise if its types are not as before."""
    before, treedef = jax.tree.flatten(like)
    after, new_treedef = jax.tree.flatten(stored)
    same = treedef == new_treedef and all(
        is_array(a) and a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(before, after, strict=True)
    )
    if not same:
        shown = [", ".join(map(describe, leaves)) for leaves in (after, before)]
        raise TypeError(
            f"mixed_precision: `advance` of the storage {storage} returned {shown[0]} "
            f"for {where}, expected {shown[1]}, as before the step; a state must keep "
            "its structure, shapes and dtypes."
        )
    return new_treedef.unflatten(map(_strong, after))


def check_decoded(storage: Storage, master: Any, like: Any, where: str) -> None:
    """Raise unless `decode` gives the shape and dtype of the master `like`."""
    is_master = isinstance(master, jax.Array) and master.shape == like.shape
    if not (is_master and master.dtype == like.dtype):
        raise TypeError(
            f"mixed_precision: `decode` of the storage {storage} returned "
            f"{describe(master)} for {where}, expected {describe(like)} of JAX, the "
            "master that `encode` was given."
        )
