"""Block quantization: arrays in 8 or 16 bits per value, or as a 16-bit float."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import saturating_cast
from optax_mp.compact._random_numbers import uniform_numbers
from optax_mp.compact._rounding import round_stochastically
from optax_mp.leafwise._block_operations import MAXIMUM, MINIMUM, Blocks

# Bit patterns of float32. Scales lie between 2^-126 and 2^126, because CPUs flush
# smaller numbers to zero, and the inverse of a larger scale is one of those.
_SMALLEST_SCALE = 0x00800000
_LARGEST_SCALE = 0x7E800000
_INFINITY = 0x7F800000


class Quantized(NamedTuple):
    """A quantized array, as `low_bit_state` stores it.

    With scales, a code c stands for scale * (c / largest code)^2, with the sign of c.
    The square spends most codes on small values, where relative precision is lost
    first.

    Attributes:
        codes: of the array's shape. int8 or int16; uint8 or uint16 if no value is
            negative. Without scales, the values in a 16-bit float.
        scales: bfloat16, the largest size in each block of neighbours along one axis,
            rounded up. None for a 16-bit float.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((256, 256))}
        >>> state = optax_mp.low_bit_state(optax.adam(1e-3)).init(params)
        >>> nu = state.inner_state[0].nu["w"]
        >>> nu.codes.dtype.name, nu.codes.shape, nu.scales.dtype.name, nu.scales.shape
        ('uint8', (256, 256), 'bfloat16', (256, 8))
    """

    codes: jax.Array
    scales: jax.Array | None


def is_quantized(node: Any) -> bool:
    """Return whether a node of a state is a quantized array."""
    return isinstance(node, Quantized)


def quantized_zeros(x: Any, dtype: DTypeLike, block_size: int | None) -> Quantized:
    """Return zeros of the shape of `x`, with codes of `dtype`.

    Args:
        x: an array, or a description of one.
        dtype: an integer dtype, or a floating one for a form without scales.
        block_size: how many values share a scale; a power of two, or None.
    """
    codes = jnp.zeros_like(x, dtype)
    if block_size is None:
        return Quantized(codes, None)
    return Quantized(codes, jnp.zeros(scales_shape(x.shape, block_size), jnp.bfloat16))


def scales_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Return the shape of the scales of an array: `shape`, shorter along one axis."""
    # Along the last axis that fills a block, because neighbours there are most alike,
    # as in one row of an embedding. If none does, along the longest.
    axis = max(range(len(shape)), key=lambda i: (min(shape[i], block_size), i))
    return (*shape[:axis], -(-shape[axis] // block_size), *shape[axis + 1 :])


# Both directions are jitted so that arrays of one shape and dtype are traced once: a
# step with 400 of them then has 400 equations, not 20000. XLA inlines the calls.
@jax.jit
def dequantize(quantized: Quantized) -> jax.Array:
    """Return the values of a quantized array, in float32."""
    codes, scales = quantized
    if scales is None:
        return codes.astype(jnp.float32)
    blocks = Blocks.of(codes.shape, scales.shape)
    roots = codes.astype(jnp.float32) * (1 / _largest_code(codes))
    return roots * jnp.abs(roots) * blocks.spread(scales.astype(jnp.float32))


@jax.jit
def quantize(x: jax.Array, like: Quantized, key: jax.Array | None) -> Quantized:
    """Return `x` in the form of `like`.

    A positive value never becomes zero where no value was negative, because optimizers
    divide by its root: in unsigned codes, and in blocks without a negative code in
    `like`. (Moments of either sign have negative codes from the second step on.) An
    infinite or NaN value makes its block NaN.

    Args:
        x: the values.
        like: the same array before the step.
        key: for stochastic rounding to one of the two neighbouring codes, right on
            average; None rounds to the nearest.
    """
    if like.scales is None:
        return Quantized(_round(x, like.codes.dtype, key), None)
    blocks = Blocks.of(like.codes.shape, like.scales.shape)
    values = x.astype(jnp.float32)
    sizes = jnp.abs(values)
    scales = _round_scales_up(blocks.reduce(MAXIMUM, _bit_pattern(sizes)))
    # A division comes last, because XLA for CPUs computes one once for each block, and
    # what it sees as cheap once for each value.
    sign = jnp.where(scales == 0, 0.0, 1.0)
    if jnp.issubdtype(like.codes.dtype, jnp.signedinteger):
        # The sign of the inverse marks these blocks. A second array of flags would cost
        # another broadcast, and broadcasting takes most of the time.
        was_negative = blocks.reduce(MINIMUM, like.codes) < 0
        sign = jnp.where(was_negative, -sign, sign)
    inverse = sign / jnp.where(scales == 0, 1, scales)
    product = sizes * blocks.spread(inverse)
    largest = _largest_code(like.codes)
    squares = jnp.minimum(jnp.abs(product), 1) * (largest * largest)
    codes = _round_roots(squares, key)
    # 1 where zero is not allowed, as the docstring says.
    smallest = (product > 0).astype(jnp.float32)
    codes = jnp.where(values < 0, -codes, jnp.where(codes == 0, smallest, codes))
    return Quantized(codes.astype(like.codes.dtype), scales.astype(jnp.bfloat16))


def _round(x: jax.Array, dtype: DTypeLike, key: jax.Array | None) -> jax.Array:
    if key is None:
        return saturating_cast(x, dtype)
    return round_stochastically(x, dtype, key).astype(dtype)


def _round_roots(squares: jax.Array, key: jax.Array | None) -> jax.Array:
    """Return the roots of nonnegative numbers, rounded to integers."""
    if key is None:
        return jnp.round(jnp.sqrt(squares))
    # Probabilities are distances between squares, not between roots, so that the value
    # is right on average, and not its root. The next square is 2 * below + 1 away.
    below = jnp.floor(jnp.sqrt(squares))
    threshold = uniform_numbers(squares.shape, key) * (2 * below + 1)
    return below + (squares - below * below > threshold)


def _largest_code(codes: jax.Array) -> float:
    return float(jnp.iinfo(codes.dtype).max)


def _bit_pattern(sizes: jax.Array) -> jax.Array:
    # Bit patterns of nonnegative floats are ordered as the floats are. CPUs vectorize a
    # maximum of integers, but not one of floats, where NaN is a special case.
    return lax.bitcast_convert_type(sizes, jnp.int32)


def _round_scales_up(largest: jax.Array) -> jax.Array:
    """Return float32 scales that are exact in bfloat16, given bit patterns of sizes."""
    # bfloat16 is the upper half of float32.
    rounded = (jnp.minimum(largest, _LARGEST_SCALE) + 0xFFFF) & -0x10000
    rounded = jnp.where(largest < _SMALLEST_SCALE, 0, rounded)
    scales = lax.bitcast_convert_type(rounded, jnp.float32)
    return jnp.where(largest >= _INFINITY, jnp.nan, scales)
