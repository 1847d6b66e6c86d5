"""One array: is it traced, how is it sharded, in which memory, and computed how often?

From JAX 0.10 on, the type of an array always shows its memory, the device's or the
host's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp.core.jax_api import _extend
from optax_mp.core.jax_api._contact import varying_axes
from optax_mp.core.jax_api._experimental import experimental

# The names of the mesh axes that one axis of an array is sharded over.
MeshAxes = tuple[str, ...]
HOST_KIND = "pinned_host"
# True if types show a memory, and JAX moves arrays between memories. Earlier versions
# cannot run such programs on CPUs, so they are untested.
KNOWS_MEMORIES = jax.__version_info__ >= (0, 10)


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array (of JAX or NumPy, traced or not)."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def describe(leaf: Any) -> str:
    """Return dtype and shape of an array, such as `bfloat16[2,3]`; else its type."""
    if is_array(leaf):
        name = "float0" if leaf.dtype == jax.dtypes.float0 else leaf.dtype
        return f"{name}[{','.join(map(str, leaf.shape))}]"
    return type(leaf).__name__


def is_traced(x: Any) -> bool:
    """Return whether `x` is a tracer, which has no values."""
    return isinstance(x, _extend.Tracer)


def compiles() -> bool:
    """Return whether `jit` compiles, which `jax.disable_jit` turns off."""
    return not getattr(jax.config, "jax_disable_jit", False)


def spec_in_type(x: Any) -> Any:
    """Return the `PartitionSpec` in the type of an array."""
    return jax.typeof(x).sharding.spec


def sharding_in_type(x: Any) -> NamedSharding | None:
    """Return the sharding in the type of an array, or None if it says nothing."""
    mesh = mesh_in_type(x)
    # Inside of shard_map the type has the sharding of the whole array.
    if not mesh.explicit_axes or varying_axes(x):
        return None
    # Types must name all axes that arrays are sharded over.
    hidden = [n for axis, n in mesh.shape.items() if axis not in mesh.explicit_axes]
    return jax.typeof(x).sharding if all(n == 1 for n in hidden) else None


def mesh_in_type(x: Any) -> Any:
    """Return the mesh in the type of an array.

    The type shows how the array is sharded over the explicit axes of the mesh.
    """
    return jax.typeof(x).sharding.mesh


def is_on_host(x: Any) -> bool:
    """Return whether an array, or a described one, is in host memory."""
    is_array = KNOWS_MEMORIES and isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return is_array and jax.typeof(x).memory_space == jax.memory.Space.Host


def is_host_type(aval: Any) -> bool:
    """Return whether arrays of a type are in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def to_host(x: jax.Array) -> jax.Array:
    """Return an array in host memory, sharded as before."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: jax.Array) -> jax.Array:
    """Return an array in the memory of its device, sharded as before."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_device_tree(tree: Any) -> Any:
    """Return a tree with all arrays in device memory."""
    return jax.tree.map(lambda x: to_device(x) if is_on_host(x) else x, tree)


def with_memory_of(tree: Any, like: Any) -> Any:
    """Return a tree with its arrays in the memories of another tree."""

    def put(x: Any, other: Any) -> Any:
        if is_on_host(x) == is_on_host(other):
            return x
        return to_host(x) if is_on_host(other) else to_device(x)

    return jax.tree.map(put, tree, like)


def place_like(leaf: jax.Array, like: jax.Array) -> jax.Array:
    """Return `leaf` `[...]`, sharded like the array `like` `[...]`.

    It is sharded by its type if that shows a sharding, and otherwise by a hint to XLA.
    XLA propagates shardings through any operation on both arrays, but before that it
    removes operations without effect. So the hint is a choice between the arrays, by a
    value that XLA cannot know; it always returns the first. In a jaxpr, the primitive
    returns both arrays. (`jax.experimental.shard_alike` did the same; JAX 0.12 no
    longer has it.)
    """
    # A sharding in a type needs no hint: XLA has to follow it.
    if sharding_in_type(like) is not None:
        return reshard_like(leaf, like)
    return _place_like.bind(leaf, like)[0]


def reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` with the sharding in the type of `like`, if it has one."""
    sharding = sharding_in_type(like)
    if sharding is None or sharding_in_type(x) == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def constant_like(x: jax.Array, value: Any) -> jax.Array:
    """Return `value` in the shape and dtype of `x`.

    Like `lax.full_like`, which takes four times as long to trace.
    """
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


def fits_groups(sharding: NamedSharding, axis: int, length: int, size: int) -> bool:
    """Return whether each device has whole groups of `size` on an axis of `length`."""
    devices = shard_count(sharding.mesh, axis_names(sharding.spec, axis))
    return devices == 1 or length % (devices * size) == 0


def entries_of(spec: PartitionSpec, ndim: int) -> list[Any]:
    """Return what a spec says of each axis of an array; None where it ends earlier."""
    return [*spec, *[None] * ndim][:ndim]


_place_like = _extend.Primitive("optax_mp_place_like")
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
_extend.mlir.register_lowering(_place_like, _extend.mlir.lower_fun(_lowered))
_extend.ad.primitive_jvps[_place_like] = lambda xs, dots: (_place_like.bind(*xs), dots)
_extend.batching.primitive_batchers[_place_like] = lambda xs, axes: (xs, axes)


def computed_once(x: jax.Array) -> jax.Array:
    """Return `x`, which XLA for CPUs then computes once for everything that reads it.

    Otherwise it computes each result of a program in a loop of its own, and `x` again
    in each loop. It may contract a product and a sum in one loop and not in another, so
    that results which belong together come from values of `x` that differ in the last
    place. A barrier does not help: XLA removes it before it decides what to compute
    where.
    """
    return _computed_once.bind(x)


_computed_once = _extend.Primitive("optax_mp_computed_once")
_identity = jax.jit(lambda x: x)


def _apart(x: jax.Array) -> jax.Array:
    with experimental("xla_metadata").set_xla_metadata(inlineable="false"):
        return _identity(x)


_lowered_for_cpus = _extend.mlir.lower_fun(_apart, multiple_results=False)
_computed_once.def_impl(lambda x: x)
_computed_once.def_abstract_eval(lambda aval: aval)
_extend.mlir.register_lowering(_computed_once, lambda _, x: [x])
_extend.mlir.register_lowering(_computed_once, _lowered_for_cpus, platform="cpu")
_extend.ad.deflinear2(_computed_once, lambda cotangent, _: [cotangent])
_extend.batching.primitive_batchers[_computed_once] = lambda xs, axes: (
    _computed_once.bind(*xs),
    axes[0],
)
