"""From an array to a `Quantized`, and back.

XLA computes the moments twice: for the largest of each line, and for the codes. That
moves less memory than storing them would. To let XLA do this, everything here except
the largest of a line is elementwise, in as few operations as possible. It uses `lax`,
because it is traced for each shape of a leaf, and `jax.numpy` takes five times as long.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from optax_mp.compact import _quantized
from optax_mp.core._random_numbers import uniform_numbers
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._contact import varying_axes
from optax_mp.core.trees._boxes import in_box_like, unbox

# Bit patterns of float32. With the least scale, 2^-62, the value of code 1 is 2^-126 or
# more. Processors flush smaller numbers to zero, and optimizers divide by them. The
# inverse of a larger scale than the largest, 2^125, would be flushed, too.
_LEAST_SCALE = np.float32(2.0**-62).view(np.int32)
_LARGEST_SCALE = np.float32(2.0**125).view(np.int32)
_INFINITY = np.int32(0x7F800000)
_ONE = np.float32(1)  # `lax` does not promote Python's where 64-bit types are on


def zeros_in(code: _quantized.Code, x: Any) -> _quantized.Quantized:
    """Return zeros of the shape of `x`, an array or a description of one."""
    codes = first = jnp.zeros_like(x, code.dtype)
    # Of a slice, for its sharding.
    starts, strides, limits = [0] * x.ndim, [1] * x.ndim, list(x.shape)
    for axis in code.axes:
        first = whole_along(first, axis % x.ndim, code.group or x.shape[axis])
        limits[axis], strides[axis] = (
            (x.shape[axis], code.group) if code.group else (1, 1)
        )
    first = lax.slice(first, starts, limits, strides)
    return _quantized.new_quantized(code, codes, jnp.zeros_like(first, jnp.bfloat16))


def decode(quantized: Any) -> Any:
    """Return the values of a quantized array, in float32, in the box of its codes.

    Other nodes of a state are returned unchanged.
    """
    if not _quantized.is_quantized(quantized):
        return quantized
    codes, scales = jax.tree.leaves(quantized)
    return in_box_like(quantized.codes, _decode(quantized.code, codes, scales))


def encode(
    x: Any, like: _quantized.Quantized, key: jax.Array | None
) -> _quantized.Quantized:
    """Return `x` in the form of `like`.

    An infinite or NaN value makes its line NaN.

    Args:
        x: the values, in a box or not.
        like: the same array before the step.
        key: for rounding at random, without bias, to one of the two neighbouring codes;
            None rounds to the nearest.
    """
    (codes, scales), treedef = jax.tree.flatten(like)
    values = lax.convert_element_type(unbox(x), jnp.float32)
    if has_untold_ranks(values):
        warn(
            "low_bit_state: within `jax.shard_map(check_vma=False)`, ranks may scale "
            "a shared line of the state differently; leave `check_vma` on, unless "
            "each rank has whole lines."
        )
    made = _encode(like.code, values, varying_axes(scales), key)
    pairs = zip(made, (codes, scales), strict=True)
    return treedef.unflatten(_arrays.reshard_like(new, old) for new, old in pairs)


# Jitted, so that arrays of one shape and code are traced once. XLA inlines the calls.
@partial(jax.jit, static_argnums=0)
def _decode(code: _quantized.Code, codes: jax.Array, scales: jax.Array) -> jax.Array:
    roots = lax.mul(lax.convert_element_type(codes, jnp.float32), _unit(code))
    scales = lax.convert_element_type(scales, jnp.float32)
    return lax.mul(_signed_power(roots, code), _spread(scales, code, codes))


@partial(jax.jit, static_argnums=(0, 2))
def _encode(
    code: _quantized.Code, values: jax.Array, axes_of_scales: frozenset[Any], key: Any
) -> tuple[jax.Array, jax.Array]:
    """Return codes and scales.

    Args:
        code: the code.
        values: float32.
        axes_of_scales: the axes of `shard_map` that scales differ over. Ranks that
            share a line have one scale for it.
        key: for rounding at random; None rounds to the nearest code.
    """
    sizes = lax.abs(values)
    largest = _largest(sizes, code)
    if shared := tuple(sorted(varying_axes(largest) - axes_of_scales, key=str)):
        largest = lax.pmax(largest, shared)
    # Up to the next bfloat16, which is the upper half of a float32.
    pattern = lax.clamp(_LEAST_SCALE, largest, _LARGEST_SCALE)
    pattern = lax.add(pattern, np.int32(0xFFFF))
    pattern = lax.bitwise_and(pattern, np.int32(-0x10000))
    scales = lax.bitcast_convert_type(pattern, jnp.float32)
    inverse = _spread(lax.div(_ONE, scales), code, values)
    # The share of the largest, its root, and the code below.
    shares = lax.min(lax.mul(sizes, inverse), _ONE)
    below = lax.mul(_root(shares, code), np.float32(jnp.iinfo(code.dtype).max))
    if key is None:
        codes = lax.round(below, lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
        below = lax.floor(below)
        # By distances between values, not between their roots.
        low = _power(lax.mul(below, _unit(code)), code)
        high = _power(lax.mul(lax.add(below, _ONE), _unit(code)), code)
        threshold = lax.mul(uniform_numbers(values.shape, key), lax.sub(high, low))
        rises = lax.gt(lax.sub(shares, low), threshold)
        codes = lax.add(below, lax.convert_element_type(rises, jnp.float32))
    if code.is_unsigned:
        # No array of zeros to compare with: see `difference`.
        is_positive = lax.gt(values, lax.neg(values))
        least = lax.convert_element_type(is_positive, jnp.float32)
        codes = lax.mul(lax.max(codes, least), least)
    else:
        codes = lax.select(lax.lt(values, sizes), lax.neg(codes), codes)
    is_finite = lax.lt(largest, _INFINITY)
    scales = lax.select(is_finite, scales, lax.full_like(scales, np.nan))
    return (
        lax.convert_element_type(codes, code.dtype),
        lax.convert_element_type(scales, jnp.bfloat16),
    )


def _unit(code: _quantized.Code) -> Any:
    return _ONE / np.float32(jnp.iinfo(code.dtype).max)


def _power(x: jax.Array, code: _quantized.Code) -> jax.Array:
    """Return a power of nonnegative numbers."""
    for _ in range(code.power.bit_length() - 1):
        x = lax.mul(x, x)
    return x


def _signed_power(x: jax.Array, code: _quantized.Code) -> jax.Array:
    if code.is_unsigned:
        return _power(x, code)
    # The last of the squares has the sign.
    for _ in range(code.power.bit_length() - 2):
        x = lax.mul(x, lax.abs(x))
    return lax.mul(x, lax.abs(x))


def _root(x: jax.Array, code: _quantized.Code) -> jax.Array:
    for _ in range(code.power.bit_length() - 1):
        x = lax.sqrt(x)
    return x


def _largest(sizes: jax.Array, code: _quantized.Code) -> jax.Array:
    """Return the bit pattern of the largest size in each line, int32."""
    # Patterns are in the order of the sizes, NaN last. XLA loses NaN in some maxima of
    # floats on CPUs: https://github.com/openxla/xla/issues/21461.
    patterns = lax.bitcast_convert_type(sizes, jnp.int32)
    if code.group is None:
        axes = tuple(axis % sizes.ndim for axis in code.axes)
        return lax.expand_dims(lax.reduce_max(patterns, axes), axes)
    last = sizes.ndim - 1
    patterns = whole_along(patterns, last, code.group)
    count = -(-sizes.shape[last] // code.group)
    missing = count * code.group - sizes.shape[last]
    if missing:
        widths = [(0, 0, 0)] * last + [(0, missing, 0)]
        patterns = lax.pad(patterns, np.int32(0), widths)
    patterns = lax.reshape(patterns, (*sizes.shape[:last], count, code.group))
    return lax.reduce_max(patterns, (last + 1,))


def _spread(scales: jax.Array, code: _quantized.Code, like: jax.Array) -> jax.Array:
    """Return for each value of an array the scale of its line."""
    axes = tuple(range(like.ndim))
    if code.group is None:
        spread = lax.broadcast_in_dim(scales, like.shape, axes)
    else:
        grouped = (*scales.shape, code.group)
        whole = (*scales.shape[:-1], scales.shape[-1] * code.group)
        spread = lax.reshape(lax.broadcast_in_dim(scales, grouped, axes), whole)
        spread = lax.slice_in_dim(spread, 0, like.shape[-1], axis=like.ndim - 1)
    return _arrays.reshard_like(spread, like)


def whole_along(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Return `x`, sharded along `axis` only if each shard has whole groups.

    If the type of an array has its sharding, JAX refuses to reshape it into groups of
    neighbours that lie on several devices.
    """
    sharding = _arrays.sharding_in_type(x)
    if sharding is None or _arrays.fits_groups(sharding, axis, x.shape[axis], size):
        return x
    entries = _arrays.entries_of(sharding.spec, x.ndim)
    entries[axis] = None
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*entries)))


def has_untold_ranks(x: Any) -> bool:
    """Return whether `x` may differ among ranks of `shard_map`, but its type is silent.

    With `check_vma=False` the types of all arrays are.
    """
    mesh = _arrays.mesh_in_type(x)
    names = [name for name in mesh.manual_axes if mesh.shape[name] > 1]
    return any(not _arrays.varying_axes(lax.axis_index(name)) for name in names)
