"""Block quantization: arrays in 8 or 16 bits per value, or as a 16-bit float."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import saturating_cast
from optax_mp._jax._arrays import constant_like, reshard_like, whole_along
from optax_mp._jax._block_operations import Blocks
from optax_mp._jax._experimental import outlined
from optax_mp.compact._random_numbers import round_stochastically, uniform_numbers
from optax_mp.trees._boxes import put, unbox
from optax_mp.trees._quantized import Code, Quantized, is_quantized, new_quantized

# Bit patterns of float32. Scales lie between 2^-126 and 2^126, because CPUs flush
# smaller numbers to zero, and the inverses of larger scales are smaller numbers.
_SMALLEST_SCALE = np.int32(0x00800000)
_LARGEST_SCALE = np.int32(0x7E800000)
_INFINITY = np.int32(0x7F800000)
_EXPONENT = np.int32(23)  # where the exponent of a float32 begins
# Numbers have dtypes: `lax` does not promote them where 64-bit types are on.
_ONE, _TWO = np.float32(1), np.float32(2)


def choose_blocks(shape: tuple[int, ...], block_size: int) -> tuple[int, int]:
    """Return the axis of the blocks of an array, counted from the end, and their size.

    Both depend only on the shape, so that a run can go on with arrays that are sharded
    in another way.
    """
    # Take the last axis of at least 4 blocks: neighbours there are most alike, as in a
    # row of an embedding, and kernels need the last axis, which has 128 elements in the
    # heads of many transformers. If no axis is as long, take the longest: several
    # devices would cut the blocks of a shorter one.
    axis = max(range(len(shape)), key=lambda i: (min(shape[i], 4 * block_size), i))
    return axis - len(shape), _size_along(shape[axis], block_size)


def _size_along(length: int, block_size: int) -> int:
    """Return the size of blocks that 2, 4 or 8 devices do not cut."""
    part = length // math.gcd(length, 8)
    if part == length:  # no two devices have as much of it
        return max(1, min(length, block_size))
    # Kernels are for powers of two.
    if 4 * math.gcd(part, block_size) >= block_size:
        return math.gcd(part, block_size)
    divisors = {n for n in range(1, math.isqrt(part) + 1) if part % n == 0}
    divisors |= {part // n for n in divisors}
    # Of shorter ones the scales take more than half a byte per value.
    long = [n for n in divisors if 8 * n >= block_size]
    return min(long, key=lambda n: max(n / block_size, block_size / n), default=part)


# At most so many rows have shifts in common: 2^-7 bytes per element. From 16 on, powers
# of two are best for kernels, then multiples of the 8 rows of a TPU's registers; groups
# of fewer than 8 would take more than codes save.
_MOST_ROWS, _GOOD_ROWS, _FEWEST_ROWS = 128, 16, 8


def choose_group(shape: tuple[int, ...], axis: int) -> int | None:
    """Return how many rows of an array have shifts in common; None for a single row.

    2, 4 or 8 devices do not split a group, as `_size_along` does it for blocks. If that
    would take groups of fewer than 8 rows, they find shifts together.

    Args:
        shape: of the array.
        axis: of its blocks, counted from the end.
    """
    if len(shape) < 2 or (length := shape[-2 if axis == -1 else -1]) == 1:
        return None
    part = length // math.gcd(length, 8)
    size = math.gcd(part, _MOST_ROWS)
    if size < _GOOD_ROWS:
        divisors = [n for n in range(1, _MOST_ROWS + 1) if part % n == 0]
        size = max(divisors, key=lambda n: (n >= _GOOD_ROWS and n % 8 == 0, n))
    # No two devices share an odd number of rows. The last group may be short.
    is_good = part < length and size >= _FEWEST_ROWS
    return size if is_good else min(length, _MOST_ROWS)


def quantized_zeros(x: Any, code: Code) -> Quantized:
    """Return zeros of the shape of `x`, an array or a description of one."""
    codes = jnp.zeros_like(x, code.dtype)
    if code.block_size is None:
        return new_quantized(code, codes, None)

    def zeros(blocks: Blocks, dtype: DTypeLike) -> jax.Array:
        # Of a slice, for its sharding.
        first = whole_along(codes, blocks.axis, blocks.size)
        first = lax.slice_in_dim(first, 0, None, blocks.size, blocks.axis)
        return jnp.zeros_like(first, dtype)

    scales = zeros(_blocks_of(x.shape, code), jnp.bfloat16)
    if code.group_size is None:
        return new_quantized(code, codes, scales)
    return new_quantized(code, codes, scales, zeros(_groups_of(x.shape, code), "uint8"))


def _blocks_of(shape: tuple[int, ...], code: Code) -> Blocks:
    return Blocks(len(shape) + code.axis, code.block_size or 1, shape[code.axis])


def _groups_of(shape: tuple[int, ...], code: Code) -> Blocks:
    axis = code.group_axis
    return Blocks(len(shape) + axis, code.group_size or 1, shape[axis])


def dequantize(quantized: Any) -> Any:
    """Return the values of a quantized array, in float32, in the box of its codes.

    Other nodes of a state are returned as they are.
    """
    if not is_quantized(quantized):
        return quantized
    code: Any = quantized.code
    codes, *others = jax.tree.leaves(quantized)
    values = lax.convert_element_type(codes, jnp.float32)
    if others:
        unit = _ONE / _largest_code(codes)
        values = _values_of(_blocks_of(codes.shape, code), values, others[0], unit)
    for shifts in others[1:]:
        down = lax.neg(lax.convert_element_type(shifts, jnp.int32))
        values = _shifted(_groups_of(codes.shape, code), values, down)
    return put(quantized.codes, values)


def quantize(x: Any, like: Quantized, key: jax.Array | None) -> Quantized:
    """Return `x` in the form of `like`.

    A positive value becomes zero only if `like.code` lets it, as it does unless
    optimizers divide by its root. An infinite or NaN value makes its block NaN.

    Args:
        x: the values, in a box or not.
        like: the same array before the step.
        key: for stochastic rounding to one of the two neighbouring codes, right on
            average; None rounds to the nearest.
    """
    code: Any = like.code
    x, (arrays, treedef) = unbox(x), jax.tree.flatten(like)
    if code.block_size is None:
        return treedef.unflatten([_round(x, arrays[0].dtype, key)])
    # Only with `lax`: see `uniform_numbers`.
    values = lax.convert_element_type(x, jnp.float32)
    largest, sign = _largest_code(arrays[0]), _ONE if code.stays_positive else -_ONE
    args = values, sign, largest * largest, key
    blocks = _blocks_of(x.shape, code)
    if code.group_size is not None:
        groups = _groups_of(x.shape, code)
        made = _coded_with_shifts(blocks, groups, arrays[0].dtype, *args)
    else:
        made = _coded(blocks, *args)
    return treedef.unflatten(
        lax.convert_element_type(reshard_like(new, old), old.dtype)
        for new, old in zip(made, arrays, strict=True)
    )


# The functions below are jitted, so that arrays of one shape are traced once: AdamW's
# step of 400 alike leaves has 18,000 equations so, and 64,000 without. They do not
# depend on the dtype of the codes, so both moments share their traces. XLA inlines the
# calls. Values and codes are float32 in the shape of the array. Scales have one entry
# for each block along its axis, and shifts, int32, one for each group of rows.
@partial(jax.jit, static_argnums=0)
def _values_of(
    blocks: Blocks, codes: jax.Array, scales: jax.Array, unit: jax.Array
) -> jax.Array:
    """Return the values of codes.

    Args:
        blocks: of the array.
        codes: float32, the shape of the array.
        scales: bfloat16, one for each block.
        unit: float32 scalar, one over the largest code.
    """
    roots = lax.mul(codes, unit)
    spread = blocks.spread(lax.convert_element_type(scales, jnp.float32))
    return lax.mul(lax.mul(roots, lax.abs(roots)), reshard_like(spread, codes))


def _coded(
    blocks: Blocks, values: jax.Array, sign: Any, largest_square: Any, key: Any
) -> list[jax.Array]:
    """Return codes and scales.

    Args:
        blocks: of the array.
        values: float32, the shape of the array.
        sign: float32 scalar, negative where a positive value may become zero.
        largest_square: float32 scalar, the square of the largest code.
        key: as of `quantize`.
    """
    scales, inverse = _scales_of(blocks, values)
    # The sign of the inverse says so, and both moments share their traces.
    inverse = lax.mul(inverse, sign)
    return [_codes_of(blocks, values, inverse, largest_square, key), scales]


# A CPU would compute the values five times. The codes get their dtype here, so that
# they are not written in float32 first.
@outlined(0, 1, 2)
def _coded_with_shifts(
    blocks: Blocks, groups: Blocks, dtype: DTypeLike, values: jax.Array, *args: Any
) -> list[jax.Array]:
    """Return codes of a dtype, scales and shifts; other arguments as of `_coded`."""
    shifts = _shifts_of(blocks, groups, values)
    codes, scales = _coded(blocks, _shifted(groups, values, shifts), *args)
    return [lax.convert_element_type(codes, dtype), scales, shifts]


# How columns are told apart. A share is an element divided by the largest element of
# its block, by exponents only, and a column is as large as its largest share. A share
# is 1 at most, so a value out of line makes no other column small, and rows of any
# size count alike.
# If all shares of a column are under a fourth, the values of the column in this
# group of rows are coded times a power of two: one more than what is missing, because
# the largest of many shares is more than usual. Between equal columns nothing is
# shifted, so their codes are what they are without shifts.
_NO_SHARE, _WHOLE_SHARE = np.int32(0), np.int32(255)  # exponents: of zeros, and of 1
_LITTLE, _MOST_SHIFT = np.int32(1), np.int32(120)
# In larger rows all shares are taken for whole, so that nothing overflows.
_LARGEST_ROW = np.int32(248)


@partial(jax.jit, static_argnums=(0, 1))
def _shifts_of(blocks: Blocks, groups: Blocks, values: jax.Array) -> jax.Array:
    """Return by how many powers of two each column of a group of rows is too small.

    int32, one for each column of each group, from `values` in float32.
    """
    pattern = lax.bitcast_convert_type(lax.abs(values), jnp.int32)
    largest = blocks.largest(whole_along(pattern, blocks.axis, blocks.size))
    of_row = lax.shift_right_logical(largest, constant_like(largest, _EXPONENT))
    is_huge, zero = lax.gt(of_row, _LARGEST_ROW), constant_like(of_row, 0)
    of_row = lax.select(is_huge, zero, of_row)
    of_row = reshard_like(blocks.spread(of_row), pattern)
    exponent = lax.shift_right_logical(pattern, constant_like(pattern, _EXPONENT))
    share = lax.min(lax.add(lax.sub(exponent, of_row), _WHOLE_SHARE), _WHOLE_SHARE)
    share = lax.select(lax.gt(exponent, _NO_SHARE), share, exponent)
    share = lax.convert_element_type(share, jnp.uint8)  # less to keep on a CPU
    share = groups.largest(whole_along(share, groups.axis, groups.size))
    share = lax.convert_element_type(share, jnp.int32)
    missing = lax.sub(_WHOLE_SHARE, share)
    is_small = lax.bitwise_and(lax.gt(missing, _LITTLE), lax.gt(share, _NO_SHARE))
    shifts = lax.min(lax.add(missing, np.int32(1)), _MOST_SHIFT)
    return lax.select(is_small, shifts, constant_like(shifts, 0))


@partial(jax.jit, static_argnums=0)
def _shifted(groups: Blocks, values: jax.Array, shifts: jax.Array) -> jax.Array:
    """Return values, float32, times two to the power of the shifts of their columns."""
    bits = lax.add(shifts, np.int32(127))
    bits = lax.shift_left(bits, constant_like(bits, _EXPONENT))
    factors = groups.spread(lax.bitcast_convert_type(bits, jnp.float32))
    return lax.mul(values, reshard_like(factors, values))


@partial(jax.jit, static_argnums=0)
def _scales_of(blocks: Blocks, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the scales, and their inverse, 0 where that is infinite.

    Scales are bfloat16, the inverse is float32, both one for each block of `values`.
    """
    # Bit patterns of nonnegative floats are ordered as the floats are. CPUs vectorize a
    # maximum of integers, but not one of floats, where NaN is a special case.
    pattern = lax.bitcast_convert_type(lax.abs(values), jnp.int32)
    largest = blocks.largest(whole_along(pattern, blocks.axis, blocks.size))
    # Up to the next bfloat16, which is the upper half of a float32.
    rounded = lax.add(lax.min(largest, _LARGEST_SCALE), np.int32(0xFFFF))
    rounded = lax.bitwise_and(rounded, np.int32(-0x10000))
    scales = lax.bitcast_convert_type(rounded, jnp.float32)
    is_small, zero = lax.lt(largest, _SMALLEST_SCALE), constant_like(scales, 0)
    inverse = lax.select(is_small, zero, lax.div(_ONE, scales))
    scales = lax.select(is_small, zero, scales)
    is_finite = lax.lt(largest, _INFINITY)
    scales = lax.select(is_finite, scales, constant_like(scales, np.nan))
    return lax.convert_element_type(scales, jnp.bfloat16), inverse


@partial(jax.jit, static_argnums=0)
def _codes_of(
    blocks: Blocks, values: jax.Array, inverse: jax.Array, largest_square: Any, key: Any
) -> jax.Array:
    """Return codes in float32; `inverse`, one for each block, as of `_scales_of`.

    It is negative where zero is allowed. Other arguments as of `_coded`.
    """
    sizes = lax.abs(values)
    product = lax.mul(sizes, reshard_like(blocks.spread(inverse), sizes))
    squares = lax.mul(lax.min(lax.abs(product), _ONE), largest_square)
    codes = _round_roots(squares, key)
    # 1 where zero is not allowed, as `quantize` says.
    # No array of zeros to compare with: see `difference`.
    is_positive, is_negative = lax.gt(product, lax.neg(product)), lax.lt(values, sizes)
    smallest = lax.convert_element_type(is_positive, jnp.float32)
    return lax.select(is_negative, lax.neg(codes), lax.max(codes, smallest))


def _round(x: jax.Array, dtype: DTypeLike, key: jax.Array | None) -> jax.Array:
    if key is None:
        return saturating_cast(x, dtype)
    return round_stochastically(x, dtype, key).astype(dtype)


def _round_roots(squares: jax.Array, key: jax.Array | None) -> jax.Array:
    """Return the roots of nonnegative numbers, rounded to integers."""
    roots = lax.sqrt(squares)
    if key is None:
        return lax.round(roots, lax.RoundingMethod.TO_NEAREST_EVEN)
    # Probabilities are distances between squares, not between roots, so that the value
    # is right on average, and not its root. The next square is 2 * below + 1 away.
    below = lax.floor(roots)
    distance = lax.add(lax.mul(below, _TWO), _ONE)
    threshold = lax.mul(uniform_numbers(squares.shape, key), distance)
    rises = lax.gt(lax.sub(squares, lax.mul(below, below)), threshold)
    return lax.add(below, lax.convert_element_type(rises, jnp.float32))


def _largest_code(codes: jax.Array) -> Any:
    return np.float32(jnp.iinfo(codes.dtype).max)
