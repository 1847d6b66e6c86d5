"""The state of `mixed_precision`, whose type says which storage made it."""

from typing import NamedTuple

import optax

from optax_mp._typed import type_with
from optax_mp.masters._storage import Storage


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
        inner_state: the state of the inner optimizer, over masters.
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
    # Not annotated: an annotation would make a field of it, and so a leaf.
    storage = None


def state_type(storage: Storage) -> type[MixedPrecisionState]:
    """Return the type of states that a storage makes, the same for equal storages."""
    return type_with(MixedPrecisionState, "storage", storage)


def storage_of(state: MixedPrecisionState, caller: str) -> Storage:
    """Return the storage of a state; raise for a state that was built by hand."""
    if state.storage is None:
        raise ValueError(
            f"{caller}: the MixedPrecisionState does not say which storage made it, "
            "expected one that `init` returned; change a state with "
            "`state._replace(...)`."
        )
    return state.storage
