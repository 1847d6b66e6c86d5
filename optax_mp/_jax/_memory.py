"""The memory that an array is in: its device's, or the host's.

From JAX 0.10 on the type of an array shows it, on every platform.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from optax_mp._jax._arrays import is_traced

HOST_KIND = "pinned_host"


# True if types of this JAX have a memory, and JAX moves arrays between. Versions before
# cannot run such programs on CPUs, so they were not tested.
KNOWS_MEMORIES = jax.__version_info__ >= (0, 10)


_HOST = jax.memory.Space.Host if KNOWS_MEMORIES else None
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct)


def kinds_of_memory(device: Any) -> list[str]:
    """Return the kinds of memory that a device can address."""
    return sorted(memory.kind for memory in device.addressable_memories())


def is_on_host(x: Any) -> bool:
    """Return whether an array, or a described one, is in host memory."""
    is_array = isinstance(x, _ARRAYS)
    return KNOWS_MEMORIES and is_array and jax.typeof(x).memory_space == _HOST


def is_stored_on_host(x: Any) -> bool:
    """Return whether an array is in host memory, whatever its type says.

    With a `SingleDeviceSharding` among the `out_shardings` of `jit`, JAX 0.10 to 0.12
    move an array to the device and leave its type as it was.
    """
    if isinstance(x, jax.Array) and not is_traced(x):
        return x.sharding.memory_kind == HOST_KIND
    return is_on_host(x)


def is_host_type(aval: Any) -> bool:
    """Return whether arrays of a type are in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def bytes_on_device(aval: Any) -> int:
    """Return how many bytes an array takes on the device.

    Low-bit codes become numbers of 32 bits there.
    """
    return aval.size * max(4, aval.dtype.itemsize)


def to_host(x: jax.Array) -> jax.Array:
    """Return an array in host memory, sharded as before."""
    if is_traced(x):
        return jax.device_put(x, jax.memory.Space.Host)
    return jax.device_put(x, x.sharding.with_memory_kind(HOST_KIND))


def with_explicit_memory_kind(x: jax.Array) -> jax.Array:
    """Return an array with a sharding that shows its memory in descriptions of it.

    With a `SingleDeviceSharding`, the type of a `ShapeDtypeStruct`, or of an array that
    Orbax restores, does not show it.
    """
    if is_traced(x) or not is_on_host(x):
        return x
    if not isinstance(x.sharding, SingleDeviceSharding):
        return x
    mesh = Mesh(list(x.devices()), ("device",))
    return jax.device_put(
        x, NamedSharding(mesh, PartitionSpec(), memory_kind=HOST_KIND)
    )


def to_device(x: jax.Array) -> jax.Array:
    """Return an array in the memory of its device, sharded as before."""
    if is_traced(x):
        return jax.device_put(x, jax.memory.Space.Device)
    return jax.device_put(x, x.sharding.with_memory_kind("device"))


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


def moves_memory(device_put: Any) -> bool:
    """Return whether a `device_put` only moves an array between host and device."""
    target, *others = device_put.params["devices"]
    return KNOWS_MEMORIES and not others and isinstance(target, jax.memory.Space)
