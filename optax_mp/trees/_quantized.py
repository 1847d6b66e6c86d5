"""A low-bit array, and how it is coded."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from optax_mp.trees._typed import type_with


@dataclass(frozen=True)
class Code:
    """How one array is quantized.

    An element x with the code c stands for

        x = scale * (c / largest code)^2 / 2^shift, with the sign of c

    where `scale` is that of its block, and `shift` that of its column in its group of
    rows. "Rows" and "columns" are meant for blocks along the last axis, as mostly.

    Attributes:
        dtype: the name of the dtype of the codes.
        axis: the axis along which neighbours share a scale, counted from the end, so
            that it stays the same under `vmap` and in stacks of layers.
        block_size: how many of them do; None for a 16-bit float without scales.
        stays_positive: whether a positive value has at least code 1, because the
            optimizer divides by its root. Others fade to zero.
        group_size: how many rows have shifts in common, along `group_axis`; None for an
            array without shifts.
    """

    dtype: str
    axis: int = -1
    block_size: int | None = None
    stays_positive: bool = False
    group_size: int | None = None

    @property
    def holds_codes(self) -> bool:
        """Return whether it makes integers, and no 16-bit floats."""
        return self.block_size is not None

    @property
    def group_axis(self) -> int:
        """Return the axis along which rows have shifts in common."""
        return -2 if self.axis == -1 else -1

    def __str__(self) -> str:
        text = self.dtype
        if self.block_size is not None:
            text += f", blocks of {self.block_size} along axis {self.axis}"
        if self.group_size is not None:
            text += f", shifts by {self.group_size} along axis {self.group_axis}"
        return text


class Quantized(NamedTuple):
    """A quantized array, as `low_bit_state` stores it.

    `Code` says what a code stands for. The square spends most codes on small values,
    where relative precision is lost first. The shift is 0, except for columns whose
    values are all under a fourth of the largest beside them.

    If each param is in a box, as Flax and haliax put it there, codes, scales and shifts
    are in boxes of that kind.

    Attributes:
        codes: of the array's shape. int8 or int16; uint8 or uint16 if no value is
            negative. Without scales, the values in a 16-bit float.
        scales: bfloat16, the largest size in each block of neighbours along one axis,
            rounded up. None for a 16-bit float.
        shifts: uint8, one for each column in each group of at most 128 rows. None for
            arrays of one axis or of one row.
        code: the dtype of the codes, the axes and sizes of blocks and groups; a class
            attribute, not a leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((256, 256))}
        >>> state = optax_mp.low_bit_state(optax.adam(1e-3)).init(params)
        >>> nu = state.inner_state[0].nu["w"]
        >>> nu.codes.dtype.name, nu.codes.shape, nu.scales.dtype.name, nu.scales.shape
        ('uint8', (256, 256), 'bfloat16', (256, 8))
        >>> nu.shifts.dtype.name, nu.shifts.shape
        ('uint8', (8, 256))
        >>> print(nu.code)
        uint8, blocks of 32 along axis -1, shifts by 32 along axis -2
    """

    codes: jax.Array
    scales: jax.Array | None
    shifts: jax.Array | None = None
    # Not annotated: an annotation would make a field of it, and so a leaf.
    code = None


def new_quantized(code: Code, *arrays: Any) -> Quantized:
    """Return an array that is stored in `code`: codes, scales and shifts."""
    return type_with(Quantized, "code", code)(*arrays)


def is_quantized(node: Any) -> bool:
    """Return whether a node of a state is a quantized array."""
    return isinstance(node, Quantized)
