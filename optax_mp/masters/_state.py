"""The state of `mixed_precision`, whose type says which storage made it."""

import copyreg
import threading
from typing import Any, NamedTuple

import optax

from optax_mp.masters.storage import Storage


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

    def __repr__(self) -> str:
        """Return the fields, with the storage between brackets."""
        fields = ", ".join(
            f"{name}={value!r}" for name, value in self._asdict().items()
        )
        return f"{type(self).__qualname__}({fields})"

    def __reduce__(self) -> Any:
        """Pickle by the storage, because the subclass cannot be imported by name."""
        if self.storage is None:
            return MixedPrecisionState, tuple(self)
        return _restore, (self.storage, *self)


class _TypeOfStorage(type):
    """The type of the subclasses, by which pickle knows them."""


_types: dict[Storage, type[MixedPrecisionState]] = {}
_lock = threading.Lock()


def state_type(storage: Storage) -> type[MixedPrecisionState]:
    """Return the type of states that a storage makes, the same for equal storages.

    A subclass for each storage, and not a field: as a leaf the storage would end up in
    checkpoints, and JAX, Orbax and Flax all treat a NamedTuple's subclass as one.
    """
    with _lock:
        if storage not in _types:
            _types[storage] = _new_type(storage)
        return _types[storage]


def _new_type(storage: Storage) -> type[MixedPrecisionState]:
    # By its name optax finds a state in others, as in `optax.tree.get(opt_state,
    # "MixedPrecisionState")`. The storage is in the name that people see.
    name = MixedPrecisionState.__name__
    members = {
        "storage": storage,
        "__slots__": (),
        "__doc__": "See the base class.",
        "__qualname__": f"{name}[{storage}]",
    }
    return _TypeOfStorage(name, (MixedPrecisionState,), members)


def _reduce_type(kind: Any) -> Any:
    return state_type, (kind.storage,)


# A tree structure is pickled with its types: `jax.experimental.serialize_executable`
# gives such structures to the user. These types have no name to be imported by.
copyreg.pickle(_TypeOfStorage, _reduce_type)


def _restore(
    storage: Storage, master_params: optax.Params, inner_state: optax.OptState
) -> MixedPrecisionState:
    return state_type(storage)(master_params, inner_state)


def storage_of(state: MixedPrecisionState, caller: str) -> Storage:
    """Return the storage of a state; raise for a state that was built by hand."""
    if state.storage is None:
        raise ValueError(
            f"{caller}: the MixedPrecisionState does not say which storage made it, "
            "expected one that `init` returned; change a state with "
            "`state._replace(...)`."
        )
    return state.storage
