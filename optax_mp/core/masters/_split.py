"""Split: the 16-bit param is a part of its master, and only the rest is stored.

The *remainder* is that rest, as an integer: int16 or int8 `[...]`, of the width
`Split.bits`. The *pattern* of a float32 `[...]` is its 32 bits, read as int32 `[...]`.
"""

from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp.core._dtypes import round_to, with_derivative_of
from optax_mp.core._random_numbers import uniform_numbers
from optax_mp.core.jax_api._arrays import computed_once, constant_like

_BFLOAT16, _FLOAT16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
# Patterns of float32 numbers; and the largest float16, as a number.
_SIGN = np.int32(-(2**31))
_LARGEST = np.int32(0x7F7FFFFF)
_LARGEST_FLOAT16 = float(jnp.finfo(_FLOAT16).max)
_INFINITY = np.int32(0x7F800000)
_LARGEST_BFLOAT16 = np.int32(0x7F7F0000)

_ZERO = np.int32(0)  # `lax` does not promote Python's where 64-bit types are on


# Jitted, so that it is traced once for all arrays of one shape and dtype.
_traced_once = partial(jax.jit, static_argnums=0)


@dataclass(frozen=True)
class Split:
    """Store only the bits of the master that its param lacks: 2 or 1 bytes per weight.

    A bfloat16 is the upper half of a float32. So a bfloat16 param and a 16-bit
    remainder are together a float32 master, bit for bit. An 8-bit remainder makes it
    24 bits. AdamW then takes 12 or 11 bytes per weight, where it takes 14 with
    `FullCopy`.

    24 bits cannot hold a master that moves by less than 2^-16 (1.5e-5) of its value: it
    would stand still. So each step rounds it at random, without bias, to one of its two
    neighbours of 24 bits, at most 2^-15 of its value away. The random numbers are a
    hash of position and `step_count`: a run can be reproduced, also from a checkpoint
    and, under `jit`, on any number of devices.

    For float16 params the remainder is a fraction of the param's last place. With 16
    bits it is exact for masters of 2^-14 and more, and within 2^-40 for smaller ones.
    With 8 bits it is rounded at random to 1/256 of a unit in the last place.

    Differences from `FullCopy`:

    - Updates are always float32, whatever the dtype of the gradients, because the param
      must reach its target exactly.
    - The param is a part of its master. If you edit a param outside of the optimizer,
      by a projection or by loading weights, the edited param *is* the new master, up to
      a remainder of at most half a unit in its last place.
    - A master halfway between two bfloat16 values is rounded away from zero, not to
      even, so that remainders fit into int16. The cast of the weights given to `init`
      rounds to even, and a remainder that does not fit is cut: one master in 131072 is
      then one unit in the last place of float32 nearer to its param. With 8 bits `init`
      rounds to nearest, and one master in 512 is up to 2^-15 off.
    - If a step shrinks a weight to less than 2^-15 of its value (float16: 2^-12), a
      float32 update may not reach the new value exactly. The master then moves with the
      param, by at most 2^-23 of the old weight.
    - Finite masters above 3.396e38 (float16: 65520) are kept as the largest finite
      value. An infinite param is its own master, and NaN stays NaN.
    - Params of 8 bits are an error. Those of 32 bits are their own masters, as with
      `FullCopy`; if all are, `init` warns.
    - In `jax.grad` through `tx.update`, rounding counts as the identity. From one step
      to the next, the derivative of a master is that of its param, in 16 bits.

    Attributes:
        bits: the width of the remainder, 16 or 8.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> storage = optax_mp.Split(bits=16)
        >>> tx = optax_mp.mixed_precision(optax.sgd(1.0), storage=storage)
        >>> state = tx.init(params)
        >>> state.master_params["w"].dtype.name
        'int16'
        >>> grads = {"w": jnp.full(2, 0.001, jnp.float32)}
        >>> updates, state = tx.update(grads, state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> float(params["w"][0]), float(optax_mp.master_params(state, params)["w"][0])
        (1.0, 0.9990000128746033)
    """

    bits: int = 16
    param_is_part = True  # it is the upper half of its master

    @property
    def is_random(self) -> bool:
        """Whether `advance` rounds at random."""
        return self.bits == 8

    def __post_init__(self) -> None:
        """Check the width."""
        if not isinstance(self.bits, Integral) or self.bits not in (8, 16):
            raise ValueError(
                f"Split: expected `bits` to be 8 or 16, got {self.bits!r}."
            )

    def takes(self, param_dtype: jnp.dtype, master_dtype: jnp.dtype) -> bool:
        """Return whether it is a 16-bit param of a float32 master."""
        is_half = param_dtype in (jnp.bfloat16, jnp.float16)
        return is_half and master_dtype == jnp.float32

    def encode(self, master: jax.Array, param: jax.Array) -> jax.Array:
        """Return the remainder of the master, cut to its width.

        Args:
            master: float32 `[...]`.
            param: bfloat16 or float16 `[...]`.

        Returns:
            int16 or int8 `[...]`.
        """
        return self._format_of(param).remainder(master, param.astype(jnp.float32))

    @_traced_once
    def decode(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        """Return the master, put together from the param and the remainder.

        Args:
            stored: int16 or int8 `[...]`, the remainder.
            param: bfloat16 or float16 `[...]`.

        Returns:
            float32 `[...]`.
        """
        master = self._format_of(param).join(stored, param.astype(jnp.float32))
        return with_derivative_of(master, param)

    @_traced_once
    def advance(
        self,
        stored: jax.Array,
        param: jax.Array,
        master: jax.Array,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the new remainder, and the param that it was taken against.

        Args:
            stored: int16 or int8 `[...]`, the remainder before the step.
            param: bfloat16 or float16 `[...]`, the param before the step.
            master: float32 `[...]`, the master after the step.
            key: uint32 `[1]`, for rounding at random to a value that a remainder of 8
                bits can have; None rounds to the nearest.

        Returns:
            int16 or int8 `[...]`, and `[...]` in the dtype of the param.
        """
        # The param moves by a float32 sum, which cannot reach every value. So the
        # remainder is taken against the value that this sum will land on.
        form = self._format_of(param)
        exact, param = master, lax.stop_gradient(param)
        # Both results must be of the same master, to the last bit.
        master = computed_once(lax.stop_gradient(exact))
        if key is not None:
            master = form.round_at_random(master, uniform_numbers(master.shape, key))
        before = lax.convert_element_type(param, jnp.float32)
        target = form.round(master)
        reached = lax.add(before, lax.sub(target, before))
        # An infinite param stays, but inf - inf is NaN.
        reached = lax.select(lax.is_finite(before), reached, target)
        landing = form.nearest(reached)
        remainder = form.remainder(master, landing)
        return remainder, with_derivative_of(landing.astype(param.dtype), exact)

    def _format_of(self, param: jax.Array) -> "_UpperHalf | _LastPlace":
        return (_UpperHalf if param.dtype == _BFLOAT16 else _LastPlace)(self.bits)


class _UpperHalf(NamedTuple):
    """Remainders of bfloat16 params: float32 patterns between the param and its master.

    Patterns count away from zero, for both signs. Remainders are int16 or int8 `[...]`,
    and all other arrays of the methods, also the param, float32 `[...]`. The methods
    call `lax`, because they are traced for each shape of a leaf: `jax.numpy` takes five
    times as long.
    """

    bits: int

    def remainder(self, master: jax.Array, param: jax.Array) -> jax.Array:
        shift = np.int32(16 - self.bits)
        pattern, base = _to_pattern(master), _to_pattern(param)
        # For a master of the other sign, the smallest remainder decodes to the nearest
        # value.
        is_other = lax.lt(lax.bitwise_xor(pattern, base), _ZERO)
        lowest = constant_like(base, -0x10000)
        excess = lax.select(is_other, lowest, lax.sub(pattern, base))
        excess = lax.add(excess, np.int32((1 << shift) // 2))
        remainder = _drop_invalid(lax.shift_right_arithmetic(excess, shift), base)
        half = 1 << (self.bits - 1)
        clamped = lax.clamp(jnp.int32(-half), remainder, jnp.int32(half - 1))
        return lax.convert_element_type(clamped, f"int{self.bits}")

    def join(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        base = _to_pattern(param)
        remainder = lax.convert_element_type(stored, jnp.int32)
        remainder = lax.shift_left(remainder, np.int32(16 - self.bits))
        return _to_float(lax.add(base, _drop_invalid(remainder, base)))

    def round(self, master: jax.Array) -> jax.Array:
        """Return the master rounded to bfloat16, with ties away from zero."""
        # As integers: a carry of the mantissa must reach the exponent, and CPUs flush
        # the smallest floats to zero.
        pattern = _to_pattern(master)
        sign, magnitude = (lax.bitwise_and(pattern, x) for x in (_SIGN, ~_SIGN))
        unit = 1 << (16 - self.bits)
        magnitude = lax.add(lax.min(magnitude, _LARGEST_BFLOAT16), np.int32(unit // 2))
        magnitude = lax.bitwise_and(magnitude, np.int32(-unit))
        magnitude = lax.add(magnitude, np.int32(0x8000))
        rounded = lax.bitwise_or(sign, lax.bitwise_and(magnitude, np.int32(-0x10000)))
        return lax.select(lax.is_finite(master), _to_float(rounded), master)

    def round_at_random(self, master: jax.Array, numbers: jax.Array) -> jax.Array:
        """Return the master rounded up or down to a value of 24 bits.

        Args:
            master: float32 `[...]`.
            numbers: float32 `[...]`, random, from [0, 1).
        """
        # The neighbours of a pattern are those of its value, also across powers of two.
        unit = 1 << (16 - self.bits)
        pattern = _to_pattern(master)
        sign, magnitude = (lax.bitwise_and(pattern, x) for x in (_SIGN, ~_SIGN))
        more = lax.convert_element_type(lax.mul(numbers, np.float32(unit)), jnp.int32)
        magnitude = lax.min(lax.add(magnitude, more), _LARGEST)
        rounded = lax.bitwise_or(sign, lax.bitwise_and(magnitude, np.int32(-unit)))
        return lax.select(lax.is_finite(master), _to_float(rounded), master)

    def nearest(self, x: jax.Array) -> jax.Array:
        # Nothing to saturate: the target is in range.
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


class _LastPlace(NamedTuple):
    """Remainders of float16 params: fractions of the param's last place.

    Remainders are int16 or int8 `[...]`, and all other arrays of the methods, also the
    param, float32 `[...]`.
    """

    bits: int

    def remainder(self, master: jax.Array, param: jax.Array) -> jax.Array:
        excess = (master - param) / self._unit_of(param)
        remainder = lax.round(excess, lax.RoundingMethod.TO_NEAREST_EVEN)
        remainder = jnp.where(jnp.isfinite(param), remainder, 0)
        half = 2.0 ** (self.bits - 1)
        low, high = jnp.float32(-half), jnp.float32(half - 1)
        clamped = lax.clamp(low, remainder, high)
        return lax.convert_element_type(clamped, f"int{self.bits}")

    def join(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        master = param + stored.astype(jnp.float32) * self._unit_of(param)
        return jnp.where(jnp.isfinite(param), master, param)

    def round(self, master: jax.Array) -> jax.Array:
        """Return the master rounded to float16, with ties towards infinity.

        The remainder of a tie is then the smallest one. Rounded down, it would be one
        more than the largest.
        """
        rounded = round_to(master, _FLOAT16)
        half_place = self._unit_of(rounded) * 2.0 ** (self.bits - 1)
        rises = (master - rounded == half_place) & (rounded < _LARGEST_FLOAT16)
        return jnp.where(rises, rounded + 2 * half_place, rounded)

    def round_at_random(self, master: jax.Array, numbers: jax.Array) -> jax.Array:
        """Return the master rounded up or down to a value that a remainder can have.

        Args:
            master: float32 `[...]`.
            numbers: float32 `[...]`, random, from [0, 1).
        """
        nearest = round_to(master, _FLOAT16)
        unit = self._unit_of(nearest)
        multiple = (master - nearest) / unit
        below = jnp.floor(multiple)
        # Not `floor(multiple + numbers)`: that sum of an integer and a number close to
        # 1 is rounded up, and a master that needs no rounding would move.
        rises = (numbers < multiple - below).astype(jnp.float32)
        rounded = nearest + (below + rises) * unit
        # The multiple of a master far out of range is infinite.
        return jnp.where(jnp.isfinite(rounded), rounded, master)

    def nearest(self, x: jax.Array) -> jax.Array:
        return round_to(x, _FLOAT16)

    def _unit_of(self, param: jax.Array) -> jax.Array:
        """Return how much a master moves if its remainder grows by 1."""
        info = jnp.finfo(_FLOAT16)
        power = _to_float(_to_pattern(param) & _INFINITY)
        last_place = jnp.maximum(power, float(info.smallest_normal)) * float(info.eps)
        return last_place * 2.0**-self.bits


def _drop_invalid(remainder: jax.Array, base: jax.Array) -> jax.Array:
    """Return `remainder`, or 0 where it is invalid for the param's pattern `base`.

    All are int32 `[...]`. There are no patterns below the pattern of zero, and no
    masters between infinity and NaN. Such a remainder is left behind if the user edits
    the param.
    """
    magnitude = lax.bitwise_and(base, ~_SIGN)
    is_zero, is_finite = lax.eq(magnitude, _ZERO), lax.lt(magnitude, _INFINITY)
    remainder = lax.select(is_zero, lax.max(remainder, _ZERO), remainder)
    return lax.select(is_finite, remainder, constant_like(remainder, 0))


def _to_pattern(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _to_float(pattern: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(pattern, jnp.float32)
