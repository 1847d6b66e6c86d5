"""sum_gradients: a sum over devices that is sent in 16 bits and added in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_map_with_path
from jax.typing import DTypeLike

from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._contact import varying_axes
from optax_mp.core.trees import _tree
from optax_mp.core.wrappers._mistakes import refuse_overwritten

_CALLER = "sum_gradients"


def sum_gradients(
    grads: _tree.PyTree,
    axis_name: Any,
    *,
    exchange_dtype: DTypeLike = jnp.bfloat16,
    scatter: bool = False,
) -> _tree.PyTree:
    """Sum gradients over mapped axes: sent in 16 bits, added in float32.

    `lax.psum` of bfloat16 gradients adds in bfloat16, so its error grows with the
    number of devices. `lax.psum` of float32 gradients sends twice the bytes. This sum
    sends each gradient rounded to `exchange_dtype`, and each device adds up its part in
    float32, in the order of the devices. The result always has the same bits.

    Call it under `jax.shard_map` on gradients of each device's own loss. If
    `shard_map` checks types, it sums the gradients of replicated params itself, so
    differentiate with respect to `jax.lax.pcast(params, axis_name, to="varying")`, or
    turn the check off by `check_vma=False`.

    Args:
        grads: a tree of floating arrays.
        axis_name: the name of the mapped axis, or a tuple of names.
        exchange_dtype: the dtype in which gradients are sent: bfloat16, float16 or
            float32.
        scatter: whether each device gets only its part, as from `lax.psum_scatter`,
            along the first dimension that the number of devices divides. Arrays without
            one, such as short biases, are returned whole.

    Returns:
        The sums. With `scatter` they are float32, as added. Otherwise they are rounded
        once more, gathered, and have `exchange_dtype`.

    Raises:
        ValueError: if `exchange_dtype` is another dtype, if a leaf is not floating, or
            if `shard_map` has summed it already.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
        ... def total(grads):
        ...     return optax_mp.sum_gradients(grads, "data")
        >>> grads = jnp.ones(8 * jax.device_count(), jnp.bfloat16)
        >>> sums = total(jax.device_put(grads, NamedSharding(mesh, P("data"))))
        >>> sums.shape, sums.dtype.name, float(sums[0]) == jax.device_count()
        ((8,), 'bfloat16', True)
    """
    dtype = check_exchange_dtype(exchange_dtype, _CALLER)
    refuse_overwritten(grads, _CALLER)
    for_one = functools.partial(_sum_leaf, axis_name, dtype, scatter)
    return tree_map_with_path(for_one, grads)


def check_exchange_dtype(dtype: Any, caller: str) -> jnp.dtype:
    """Return the dtype to send gradients in, or raise."""
    dtype = _dtypes.floating_dtype(dtype, f"{caller}: `exchange_dtype`")
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"{caller}: expected `exchange_dtype` to be bfloat16, float16 or float32, "
            f"got {dtype.name}."
        )
    return dtype


def as_pattern(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return `x` in a floating dtype, as integers of its bits.

    XLA would send 16-bit floats as float32 on CPUs, and may move casts across a
    collective.
    """
    return lax.bitcast_convert_type(
        x.astype(dtype), jnp.dtype(f"uint{_dtypes.bits(dtype)}")
    )


def sum_patterns(patterns: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the float32 sum over the first axis, added in its order."""
    stacked = lax.bitcast_convert_type(patterns, dtype)

    def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total + x.astype(jnp.float32), None

    # -0.0 + x is x for each x, and reduces of XLA have no order.
    start = -jnp.zeros_like(stacked[0], jnp.float32)
    return lax.scan(add, start, stacked, unroll=16)[0]


def _sum_leaf(
    axis_name: Any, dtype: jnp.dtype, scatter: bool, path: Any, x: jax.Array
) -> jax.Array:
    """Return the sum of one leaf, or raise if it cannot be summed, or is already."""
    if not _dtypes.is_floating(x):
        raise ValueError(
            f"{_CALLER}: expected leaf {_tree.spell(path)} to be a floating array, got "
            f"{_arrays.describe(x)}; sum other leaves by `jax.lax.psum`."
        )
    # Without `check_vma` no type says anything.
    if missing := varying_axes(lax.axis_index(axis_name)) - varying_axes(x):
        raise ValueError(
            f"{_CALLER}: expected leaf {_tree.spell(path)} to be of each device's own "
            f"loss, got {_arrays.describe(x)} that is equal on all devices of "
            f"{sorted(missing)}; differentiate with respect to `jax.lax.pcast(params, "
            "axis_name, to='varying')`."
        )
    count = lax.axis_size(axis_name)
    dim = next((d for d, n in enumerate(x.shape) if n and n % count == 0), None)
    if dim is None:
        # Norms and biases: so few that all devices can get the float32 sums.
        flat = jnp.pad(x.reshape(-1), (0, count - x.size % count))
        part = _sum_part(axis_name, dtype, 0, flat)
        whole = _gather(axis_name, jnp.float32 if scatter else dtype, 0, part)
        return whole[: x.size].reshape(x.shape)
    part = _sum_part(axis_name, dtype, dim, x)
    return part if scatter else _gather(axis_name, dtype, dim, part)


def _sum_part(axis_name: Any, dtype: jnp.dtype, dim: int, x: jax.Array) -> jax.Array:
    """Return each device's part, along a dimension, of the float32 sum."""
    count = lax.axis_size(axis_name)
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    patterns = as_pattern(x, dtype).reshape(shape)
    received = lax.all_to_all(patterns, axis_name, split_axis=dim, concat_axis=0)
    return sum_patterns(received, dtype)


def _gather(axis_name: Any, dtype: DTypeLike, dim: int, part: jax.Array) -> jax.Array:
    """Return the whole array, in a dtype, of the part of each device."""
    whole = gather_equal(as_pattern(part, dtype), axis_name, dim)
    return lax.bitcast_convert_type(whole, dtype)


def gather_equal(x: jax.Array, axis_name: Any, axis: int) -> jax.Array:
    """Gather along an axis; the type says that the result is equal on all ranks."""
    if not _arrays.varying_axes(x):  # of pmap, vmap and shard_map without checks
        return lax.all_gather(x, axis_name, axis=axis, tiled=True)
    gather = getattr(lax, "all_gather_invariant", None)  # JAX 0.8
    if gather is not None:
        return gather(x, axis_name, axis=axis, tiled=True)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True, to="invarying")
