"""Shard one array like another: by its type, or by a hint to XLA.

XLA propagates shardings through any operation on both arrays, but it removes operations
without effect before that. So a number that XLA cannot know chooses between the arrays.
The result is always the first one. To analyses of jaxprs, the primitive hands on both.
(JAX 0.12 has no `jax.experimental.shard_alike` any more, which would do the same.)
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._jax._arrays import is_traced, mesh_in_type, sharding_in_type
from optax_mp._jax._primitives import Primitive, ad, batching, mlir

# The names of the mesh axes that one axis of an array is sharded over.
MeshAxes = tuple[str, ...]


def place_like(leaf: jax.Array, like: jax.Array) -> jax.Array:
    """Return `leaf`, sharded like another array of its shape."""
    # A sharding in a type needs no hint: XLA has to follow it.
    if sharding_in_type(like) is not None:
        return reshard_like(leaf, like)
    return _place_like.bind(leaf, like)[0]


def whole_along(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Return `x`, not sharded along `axis` unless each part has whole blocks.

    If the type of an array has its sharding, JAX refuses to reshape it into blocks that
    lie on several devices.
    """
    sharding = sharding_in_type(x)
    if sharding is None or fits_blocks(sharding, axis, x.shape[axis], size):
        return x
    entries = entries_of(sharding.spec, x.ndim)
    entries[axis] = None
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*entries)))


def reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` with the sharding in the type of `like`, if it has one."""
    sharding = sharding_in_type(like)
    if sharding is None or sharding_in_type(x) == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def constant_like(x: jax.Array, value: Any) -> jax.Array:
    """Return what `lax.full_like` does, which takes four times as long to trace."""
    # Elsewhere it has to be on the devices of `x`, or sharded as the type of `x` says.
    if not is_traced(x) or mesh_in_type(x).explicit_axes:
        return lax.full_like(x, value)
    return lax.broadcast_in_dim(np.array(value, x.dtype), x.shape, ())


def with_sharding_of(x: jax.Array, stored: Any) -> jax.Array:
    """Return `x` with the sharding in the type of an array of its shape in `stored`."""
    if not isinstance(x, jax.Array):
        return x
    alike = [y for y in jax.tree.leaves(stored) if y.shape == x.shape]
    return reshard_like(x, alike[0]) if alike else x


def axis_names(spec: PartitionSpec, axis: int) -> MeshAxes:
    """Return the mesh axes that a spec shards one axis of an array over."""
    entry = tuple(spec)[axis] if axis < len(spec) else None
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shard_count(mesh: Any, names: MeshAxes) -> int:
    """Return how many shards these mesh axes make."""
    return math.prod(mesh.shape[name] for name in names)


def fits_blocks(sharding: NamedSharding, axis: int, length: int, size: int) -> bool:
    """Return whether each device has whole blocks of an array's axis."""
    devices = shard_count(sharding.mesh, axis_names(sharding.spec, axis))
    return devices == 1 or length % (devices * size) == 0


def entries_of(spec: PartitionSpec, ndim: int) -> list[Any]:
    """Return what a spec says of each axis of an array; None where it ends earlier."""
    return [*spec, *[None] * ndim][:ndim]


_place_like = Primitive("optax_mp_place_like")
_place_like.multiple_results = True


def _hand_on(leaf: Any, like: Any) -> list[Any]:
    return [leaf, like]


def _lowered(leaf: jax.Array, like: jax.Array) -> list[jax.Array]:
    # Not a choice between two constants: XLA removes that if they are equal.
    never = lax.optimization_barrier(jnp.zeros((), bool))
    other = jnp.real(like) if not jnp.iscomplexobj(leaf) else like
    never = jnp.broadcast_to(never, leaf.shape)
    return [lax.select(never, other.astype(leaf.dtype), leaf), like]


_place_like.def_impl(_hand_on)
_place_like.def_abstract_eval(_hand_on)
mlir.register_lowering(_place_like, mlir.lower_fun(_lowered))
ad.primitive_jvps[_place_like] = lambda xs, dots: (_place_like.bind(*xs), dots)
batching.primitive_batchers[_place_like] = lambda xs, axes: (xs, axes)
