"""How the arrays are sharded that a wrapper hands to the transformation in it.

Under `jit` with automatic sharding nothing else says so: `zero1` cuts the params, and
`offload` in it wants to know how.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten_with_path

from optax_mp._states import Path

# By the path of a param: its shape, and how it is sharded.
Parts = Mapping[Path, tuple[tuple[int, ...], NamedSharding]]
_parts: ContextVar[Parts | None] = ContextVar("parts", default=None)


@contextmanager
def hand_on(parts: Parts) -> Iterator[None]:
    """Say how params are sharded, for what is traced meanwhile."""
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)


def shardings_handed_on(params: Any) -> Sequence[NamedSharding | None] | None:
    """Return how each param is sharded; None if no wrapper around says it."""
    parts = _parts.get()
    if parts is None:
        return None
    found = []
    for path, leaf in tree_flatten_with_path(params)[0]:
        shape, sharding = parts.get(path, (None, None))
        found.append(sharding if shape == jnp.shape(leaf) else None)
    return found
