"""How a master is kept between steps."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from optax_mp._dtypes import round_to
from optax_mp._tree import describe, is_floating


class Storage(Protocol):
    """The form in which a master lives in the optimizer state, leaf by leaf.

    A storage may keep less than the master where the param holds the rest, so both
    directions see the param, and `encode` also says what the param has to become.
    """

    def encode(
        self, master: jax.Array, param: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return what to keep, and the value that the param is to land on.

        Args:
            master: the new master.
            param: the param as it is now, in its own dtype.

        Returns:
            The kept form, one array of the master's shape, and a value in the master's
            dtype (or float32 if that is wider) that the param's dtype holds exactly.
        """
        ...

    def decode(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        """Return the master that `encode` was given, once the param has landed."""
        ...


@dataclass(frozen=True)
class FullCopy:
    """Keep every master as it is: 4 bytes a weight for float32 masters.

    Example:
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.FullCopy())
    """

    def encode(
        self, master: jax.Array, param: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the master itself, and the master rounded to the param's dtype."""
        return master, round_to(master, param.dtype)

    def decode(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        """Return the stored master; the param adds nothing."""
        del param
        return stored


def check_storage(storage: Any) -> None:
    """Raise unless `storage` is one, before anything runs."""
    missing = not (hasattr(storage, "encode") and hasattr(storage, "decode"))
    if missing or isinstance(storage, type):
        raise TypeError(
            f"mixed_precision: `storage` is {storage!r}, expected a storage object "
            "such as `optax_mp.FullCopy()`."
        )


def storage_of(stored: Any) -> Storage:
    """Return the storage that made a stored leaf; its dtype says which."""
    if not is_floating(stored):
        raise TypeError(
            f"optax_mp: a stored master is {describe(stored)}, expected a floating "
            "array; the state was not made by `optax_mp.mixed_precision`."
        )
    return FullCopy()
