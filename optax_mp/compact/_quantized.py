"""A low-bit array, the equation of its codes, and which values share a scale."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from optax_mp.core.trees._typed import type_with

# A line along the last axis, unless the axis before is this many times shorter: as in a
# head, which has at least so many features. Fewer rows are of layers or of attention.
_MOST_UNEVEN, _FEWEST_FEATURES = 8, 128
# In shorter lines the scales, of 2 bytes, would take over an eighth of a byte a value.
_SHORTEST_LINE = 16
# Neighbours that share a scale where there are no lines: in arrays of one axis, and in
# a few rows that are longer than those of stacked norms, biases or heads.
_GROUP, _LONGEST_ROW = 256, 8192
# The power of a code, by the dtype of the codes. A first moment is as large as
# gradients, and a second one as their squares, so its power is twice that. Then both
# tell gradients apart down to 4e-9 of the largest in the line or less. At the largest,
# neighbouring codes are 3% apart. Codes of 16 bits keep about that range, and spend
# their bits on resolution.
_POWERS = {"int8": 4, "uint8": 8, "int16": 2, "uint16": 4}


@dataclass(frozen=True)
class Code:
    """How one array is quantized.

    An element with the integer code c stands for

        scale * (c / largest code)^power, with the sign of c

    where `scale` is the scale of its line: the values along `axes`, or along a part of
    the last axis. The power spends most codes on small values, whose relative precision
    matters as much as that of large ones, because optimizers divide moments by each
    other.

    Attributes:
        dtype: the name of the dtype of the codes. Unsigned for arrays that are never
            negative: a value above 0 then has at least code 1.
        axes: the axes that a line goes along, counted from the end, so that they stay
            the same under `vmap` and in stacks of layers.
        group: how many neighbours along the last axis share a scale, if not all.
    """

    dtype: str
    axes: tuple[int, ...]
    group: int | None = None

    @property
    def power(self) -> int:
        """Return the power in the equation."""
        return _POWERS[self.dtype]

    @property
    def is_unsigned(self) -> bool:
        """Return whether no value is negative."""
        return self.dtype.startswith("u")

    def __str__(self) -> str:
        lines = " and ".join(map(str, self.axes))
        if self.group is not None:
            return f"{self.dtype}, a scale for {self.group} neighbours"
        return f"{self.dtype}, a scale for each line along axis {lines}"


def choose_lines(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
    """Return the axes that lines go along, and the size of groups, or None.

    Both depend only on the shape, so that a run can go on with arrays that are sharded
    in another way. Leading axes are batches: of layers, experts, heads.
    """
    last, before = shape[-1], shape[-2] if len(shape) > 1 else 1
    if last > _MOST_UNEVEN * before:
        # Columns of a head over a vocabulary belong to tokens, which are seen more or
        # less often.
        if before >= _FEWEST_FEATURES:
            return (-2,), None
        is_row = len(shape) > 1 and last <= _LONGEST_ROW
        return (-1,), None if is_row or last <= _GROUP else _GROUP
    if last >= _SHORTEST_LINE:
        return (-1,), None
    if before >= _SHORTEST_LINE:
        return (-2,), None
    # Axes of a kernel of a convolution, or of small heads: several make a line.
    axes, length = [-1], last
    while length < _SHORTEST_LINE and len(axes) < len(shape):
        axes.append(-len(axes) - 1)
        length *= shape[axes[-1]]
    return tuple(axes), None


class Quantized(NamedTuple):
    """A quantized array, as `low_bit_state` stores it.

    `Code` says what a code stands for. If params are in boxes of Flax or haliax, codes
    and scales are in boxes of that kind.

    Attributes:
        codes: int8 or int16, or uint8 or uint16 if no value is negative; of the array's
            shape.
        scales: bfloat16, the largest size in each line, rounded up. They have the
            array's shape, with 1 for the axes of a line, or with the number of groups
            for the last axis if groups of neighbours share a scale.
        code: the dtype of the codes and the axes of lines; a class attribute, not a
            leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((256, 512))}
        >>> state = optax_mp.low_bit_state(optax.adam(1e-3)).init(params)
        >>> nu = state.inner_state[0].nu["w"]
        >>> nu.codes.dtype.name, nu.codes.shape, nu.scales.dtype.name, nu.scales.shape
        ('uint8', (256, 512), 'bfloat16', (256, 1))
        >>> print(nu.code)
        uint8, a scale for each line along axis -1
    """

    codes: jax.Array
    scales: jax.Array
    # Not annotated: an annotation would make a field of it, and so a leaf.
    code = None
    is_one_leaf = True  # it is in the place of one array


def new_quantized(code: Code, codes: Any, scales: Any) -> Quantized:
    """Return an array that is stored in `code`."""
    return type_with(Quantized, "code", code)(codes, scales)


def is_quantized(node: Any) -> bool:
    """Return whether a node of a state is a quantized array."""
    return isinstance(node, Quantized)
