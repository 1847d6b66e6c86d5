"""Tell XLA to shard one array like another.

XLA propagates shardings through any operation on both arrays, but it removes operations
without effect before that. So a number that XLA cannot know chooses between the arrays.
The result is always the first one: analyses of jaxprs know this primitive by name.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NAME = "optax_mp_place_like"
_place_like = Primitive(NAME)


def place_like(leaf: jax.Array, like: jax.Array) -> jax.Array:
    """Return `leaf`, sharded like another array of its shape."""
    return _place_like.bind(leaf, like)


@_place_like.def_impl
def _first(leaf: jax.Array, like: jax.Array) -> jax.Array:
    return leaf


@_place_like.def_abstract_eval
def _abstract(leaf: Any, like: Any) -> Any:
    return leaf


def _lowered(leaf: jax.Array, like: jax.Array) -> jax.Array:
    never = lax.optimization_barrier(jnp.zeros((), bool))
    if jnp.iscomplexobj(like) and not jnp.iscomplexobj(leaf):
        like = jnp.real(like)
    # Not a choice between two constants: XLA removes that if they are equal.
    never = jnp.broadcast_to(never, leaf.shape)
    return lax.select(never, like.astype(leaf.dtype), leaf)


def _jvp(primals: Any, tangents: Any) -> Any:
    return _place_like.bind(*primals), tangents[0]


def _batched(args: Any, axes: Any) -> Any:
    return args[0], axes[0]


mlir.register_lowering(_place_like, mlir.lower_fun(_lowered, multiple_results=False))
ad.primitive_jvps[_place_like] = _jvp
batching.primitive_batchers[_place_like] = _batched
