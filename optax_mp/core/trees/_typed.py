"""NamedTuples whose type carries a setting."""

import copyreg
from collections.abc import Hashable
from typing import Any


class _Typed(type):
    """The type of the subclasses, for pickle."""

    made_from: tuple[type, str, Hashable]


_types: dict[tuple[type, str, Hashable], _Typed] = {}


def type_with(base: type, name: str, value: Hashable) -> Any:
    """Return the subclass of a NamedTuple class in which `name` is `value`.

    Equal values have the same subclass. It is a subclass and not a field: as a leaf the
    value would end up in checkpoints, and JAX, Orbax and Flax all treat the subclass of
    a NamedTuple as one.
    """
    key = (base, name, value)
    if key not in _types:
        members = {
            name: value,
            "made_from": key,
            "__slots__": (),
            "__doc__": "See the base class.",
            "__module__": base.__module__,
            # By `__name__` optax finds a state in others, as in
            # `optax.tree.get(opt_state, "MixedPrecisionState")`. People see this:
            "__qualname__": f"{base.__name__}[{value}]",
            "__reduce__": _reduce,
            "__repr__": _repr,
        }
        # Another thread may have been faster.
        _types.setdefault(key, _Typed(base.__name__, (base,), members))
    return _types[key]


def _repr(node: Any) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in node._asdict().items())
    return f"{type(node).__qualname__}({fields})"


# By what the subclass was made from, because it cannot be imported by its name. Tree
# structures are also pickled: `jax.experimental.serialize_executable` does it.
def _reduce(node: Any) -> Any:
    return _restore, (*type(node).made_from, *node)


def _restore(base: type, name: str, value: Hashable, *fields: Any) -> Any:
    return type_with(base, name, value)(*fields)


copyreg.pickle(_Typed, lambda kind: (type_with, kind.made_from))
