"""Arrays in 8 or 16 bits a value: companded in blocks, or as a 16-bit float."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import saturating_cast
from optax_mp.compact._dither import chances, rounded_by_chance

Reduction = Callable[..., jax.Array]

# As patterns of float32. CPUs take what is under 2^-126 for zero, so also the inverse
# of what is over 2^126.
_LARGEST_SCALE = 0x7E800000
_SMALLEST_SCALE = 0x00800000


class Quantized(NamedTuple):
    """An array in few bits, as `low_bit_state` keeps it.

    With scales, a code c stands for scale * (c / largest code)^2, with the sign of c:
    the root spends the codes on small values, where relative precision is lost first.

    Attributes:
        codes: of the array's shape. int8 or int16; uint8 or uint16 where no value is
            negative. Or the values in a 16-bit float.
        scales: bfloat16, the largest value of each block of neighbours along one axis,
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


def blank(x: Any, dtype: DTypeLike, block_size: int | None) -> Quantized:
    """Return zeros of the shape of `x`, with codes of `dtype`.

    Args:
        x: an array, or a description of one.
        dtype: an integer dtype, or a floating one for a form without scales.
        block_size: how many values have one scale; a power of two, or None.
    """
    codes = jnp.zeros_like(x, dtype)
    if block_size is None:
        return Quantized(codes, None)
    shape = list(x.shape)
    # Neighbours in the last axis belong together most, as of one row of an embedding.
    axis = max(range(len(shape)), key=lambda i: (shape[i] >= block_size, i))
    if shape[axis] < block_size:
        axis = max(range(len(shape)), key=lambda i: (shape[i], i))
    shape[axis] = -(-shape[axis] // block_size)
    return Quantized(codes, jnp.zeros(shape, jnp.bfloat16))


def dequantized(quantized: Quantized) -> jax.Array:
    """Return the values in float32."""
    codes, scales = quantized
    if scales is None:
        return codes.astype(jnp.float32)
    blocks = _Blocks(codes.shape, scales.shape)
    roots = codes.astype(jnp.float32) * (1 / _top(codes))
    return roots * jnp.abs(roots) * blocks.spread(scales.astype(jnp.float32))


def quantized(x: jax.Array, like: Quantized, key: jax.Array | None) -> Quantized:
    """Return `x` in the form of `like`.

    With a `key` a value becomes one of its two neighbours by chance, so that it is kept
    on average; without, the nearest code. A positive value does not become zero where
    none was negative, since optimizers divide by its root: in unsigned codes, and in
    blocks of signed codes that were positive throughout (a moment of either sign is
    not, but in the first step). Where a value is infinite or NaN, its block is NaN.
    """
    if like.scales is None:
        if key is None:
            return Quantized(saturating_cast(x, like.codes.dtype), None)
        rounded = rounded_by_chance(x, like.codes.dtype, key)
        return Quantized(rounded.astype(like.codes.dtype), None)
    top = _top(like.codes)
    is_signed = jnp.issubdtype(like.codes.dtype, jnp.signedinteger)
    blocks = _Blocks(like.codes.shape, like.scales.shape)
    values = x.astype(jnp.float32)
    sizes = jnp.abs(values)
    scales = _scales(blocks.reduced(jnp.max, _pattern(sizes)))
    inverse = jnp.where(scales == 0, 0, 1 / scales)
    if is_signed:
        # As the sign of what is spread anyway, for to spread is what takes time.
        was_negative = blocks.reduced(jnp.min, like.codes) < 0
        inverse = jnp.where(was_negative, -inverse, inverse)
    inverse = blocks.spread(inverse)
    squares = jnp.clip(sizes * jnp.abs(inverse), 0, 1) * (top * top)
    if key is None:
        codes = jnp.round(jnp.sqrt(squares))
    else:
        # Between two codes by the distance of their squares: right on average of the
        # values, not of their roots.
        below = jnp.floor(jnp.sqrt(squares))
        gap = chances(squares.shape, key) * (2 * below + 1)
        codes = jnp.minimum(below + (squares - below * below > gap), top)
    least = ((squares > 0) & (inverse > 0)).astype(jnp.float32)
    codes = jnp.where(values < 0, -codes, jnp.maximum(codes, least))
    return Quantized(codes.astype(like.codes.dtype), scales.astype(jnp.bfloat16))


def _top(codes: jax.Array) -> float:
    return float(jnp.iinfo(codes.dtype).max)


def _pattern(sizes: jax.Array) -> jax.Array:
    # Patterns of floats that are not negative are ordered as the floats are, and a
    # maximum of integers is vectorised on CPU, where one of floats is not (NaN).
    return lax.bitcast_convert_type(sizes, jnp.int32)


def _scales(largest: jax.Array) -> jax.Array:
    """Return the scales in float32, given patterns: rounded up to bfloat16."""
    raised = (jnp.minimum(largest, _LARGEST_SCALE) + 0xFFFF) & -0x10000
    raised = jnp.where(largest < _SMALLEST_SCALE, 0, raised)
    scales = lax.bitcast_convert_type(raised, jnp.float32)
    return jnp.where(largest >= 0x7F800000, jnp.nan, scales)


class _Blocks:
    """The blocks of an array along the axis that has fewer scales than values."""

    def __init__(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
        axes = [i for i in range(len(shape)) if shape[i] != scales[i]]
        self.axis = axes[0] if axes else len(shape) - 1
        self.count = scales[self.axis]
        self.length = shape[self.axis]
        # A power of two by itself: ceil(length / size) blocks of another do not exist.
        self.size = 1
        while self.size * self.count < self.length:
            self.size *= 2

    def reduced(self, reduction: Reduction, values: jax.Array) -> jax.Array:
        """Return the reduction of each block, and of zero where one is not full."""
        widths = [(0, 0)] * values.ndim
        widths[self.axis] = (0, self.count * self.size - self.length)
        shape = list(values.shape)
        shape[self.axis : self.axis + 1] = [self.count, self.size]
        return reduction(jnp.pad(values, widths).reshape(shape), axis=self.axis + 1)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Return for each value the scale of its block."""
        # Repeated, and not the values split into blocks: so XLA sees that the codes of
        # a state are read and overwritten place by place.
        shape = list(scales.shape)
        shape.insert(self.axis + 1, self.size)
        repeated = jnp.broadcast_to(jnp.expand_dims(scales, self.axis + 1), shape)
        shape[self.axis : self.axis + 2] = [self.count * self.size]
        return lax.slice_in_dim(repeated.reshape(shape), 0, self.length, axis=self.axis)
