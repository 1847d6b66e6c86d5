"""How a master is kept between steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from optax_mp._dtypes import round_to
from optax_mp._tree import describe, is_floating, is_inexact, place
from optax_mp.masters.storage._split import Split


class Storage(Protocol):
    """The form in which a master lives in the optimizer state, leaf by leaf.

    A storage may keep less than the master where the param holds the rest, so both ways
    go against the param and its dtype. What is decoded again is the nearest to `master`
    of all masters that `param` can be a part of: `master` itself, to the storage's
    precision, where the param is `round(master, dtype)`.
    """

    def dtype(self, master_dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype of what is kept, by which storages are told apart."""
        ...

    def round(self, master: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return what a param of `dtype` is to become, in the master's dtype or wider.

        A value that `dtype` holds exactly.
        """
        ...

    def encode(
        self, master: jax.Array, param: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """Return what to keep beside a param of `dtype`: one array of its shape."""
        ...

    def decode(
        self, stored: jax.Array, param: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """Return the master."""
        ...


@dataclass(frozen=True)
class FullCopy:
    """Keep every master as it is: 4 bytes a weight for float32 masters.

    The default. It loses nothing, for any `master_dtype` and params of any floating
    dtype. A param that is edited outside of the optimizer returns to its master at the
    next update; see `replace_master_params`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.FullCopy())
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> state.master_params["w"].dtype.name, state.master_params["w"].nbytes
        ('float32', 8)
    """

    def dtype(self, master_dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype of masters."""
        return master_dtype

    def round(self, master: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the master rounded to nearest, ties to even."""
        return round_to(master, dtype)

    def encode(
        self, master: jax.Array, param: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """Return the master itself."""
        del param, dtype
        return master

    def decode(
        self, stored: jax.Array, param: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """Return the stored master; the param adds nothing."""
        del param, dtype
        return stored


def check_storage(
    storage: Any, master_dtype: jnp.dtype, update_dtype: jnp.dtype | str | None
) -> None:
    """Raise unless `storage` is one and goes with the dtypes, before anything runs."""
    wanted = ("dtype", "round", "encode", "decode")
    if isinstance(storage, type) or not all(hasattr(storage, x) for x in wanted):
        raise TypeError(
            f"mixed_precision: `storage` is {storage!r}, expected a storage object "
            "such as `optax_mp.FullCopy()` or `optax_mp.Split(bits=16)`."
        )
    if not isinstance(storage, Split):
        return
    if master_dtype != jnp.float32:
        raise ValueError(
            f"mixed_precision: `master_dtype` is {master_dtype}, expected float32 with "
            f"the storage {storage}; use `optax_mp.FullCopy()` for other masters."
        )
    if update_dtype is not None and update_dtype != jnp.float32:
        raise ValueError(
            f"mixed_precision: `update_dtype` is {update_dtype}, expected float32 or "
            f"None with the storage {storage}, whose params must land exactly; use "
            "`optax_mp.FullCopy()` for updates in another dtype."
        )


def check_storable(
    storage: Storage,
    paths: Sequence[tuple[Any, ...]],
    params: Sequence[Any],
    dtypes: Sequence[jnp.dtype | None],
    has_master: Sequence[bool],
) -> None:
    """Raise unless `storage` can keep the masters of these params.

    Args:
        storage: a storage.
        paths: where each param is.
        params: the params.
        dtypes: the dtype of each in training, or None where it is not floating.
        has_master: whether each is to have a master.
    """
    if not isinstance(storage, Split):
        return
    expected = (
        f"expected bfloat16 or float16 with the storage {storage}, which keeps what "
        "such a param lacks to be float32"
    )
    for path, param, dtype, stored in zip(
        paths, params, dtypes, has_master, strict=True
    ):
        if stored and dtype not in (jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"mixed_precision: param {place(path)} is {describe(param)}, in "
                f"training {dtype}, {expected}; use `optax_mp.FullCopy()` for it."
            )
    # One float32 leaf among others is its own master; if all are, something is amiss.
    inexact = [i for i, param in enumerate(params) if is_inexact(param)]
    if inexact and not any(has_master):
        path, param = paths[inexact[0]], params[inexact[0]]
        raise ValueError(
            f"mixed_precision: param {place(path)} is {describe(param)}, and no other "
            f"is narrower than a master, {expected}. Cast the params with "
            "`optax_mp.cast_floating`, or say with `param_dtype` what they will be "
            "cast to; params that stay as they are need no storage."
        )


def check_carrier(storage: Storage, param: Any, where: str) -> None:
    """Raise unless `param` is one that what is stored belongs to.

    Args:
        storage: a storage.
        param: a param.
        where: what to call it, function first.
    """
    if isinstance(storage, Split) and param.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"{where} is {describe(param)}, expected bfloat16 or float16, of which the "
            f"master is the other part with {storage}; cast the params as they are in "
            "training, by `Policy.cast_to_param` or `optax_mp.cast_floating`, and give "
            "those."
        )


def storage_of(stored: Any) -> Storage:
    """Return the storage that made a stored leaf; its dtype says which."""
    for bits in (8, 16):
        if getattr(stored, "dtype", None) == jnp.dtype(f"int{bits}"):
            return Split(bits)
    if not is_floating(stored):
        raise TypeError(
            f"optax_mp: a stored master is {describe(stored)}, expected a floating "
            "array, or int16 or int8 remainders; the state was not made by "
            "`optax_mp.mixed_precision`."
        )
    return FullCopy()
