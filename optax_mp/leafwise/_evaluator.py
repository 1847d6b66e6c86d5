"""Evaluate elementwise equations on a part of the arrays of a leaf.

All values are 32 bits wide in a kernel, whatever their dtype, because TPUs and GPUs
have few operations on narrower ones, and these differ among generations. Integers of 8
and 16 bits are held as int32, and 16-bit floats as float32, rounded after each
operation. An equation that a kernel's evaluator does not know raises; then XLA computes
it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import bits
from optax_mp._jax._block_operations import SPREAD, blocks_in, is_block_operation
from optax_mp._jax._jaxpr import bind
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._program import Node, Value, read


@dataclass(frozen=True)
class Part:
    """The arrays of a leaf that one device holds: all, or a shard of each.

    Attributes:
        whole: the shape of the arrays of elements, on all devices together.
        shape: of their shards, with the axis of blocks behind all others.
        block_size: how many elements along that axis share a scale.
        origin: the place of the first element in the whole arrays, as in `shape`.
        axis: the place of the last axis in `whole`.
        group_size: how many elements along the axis before it share a shift.
    """

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    block_size: int
    origin: tuple[Any, ...]
    axis: int = -1
    group_size: int = 1

    def place_of(self, axis: int) -> int:
        """Return the place in `shape` of an axis of `whole`."""
        own = self.axis % len(self.whole)
        return len(self.whole) - 1 if axis == own else axis - (axis > own)

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many rows and columns of elements share an entry of an array.

        Args:
            shape: of the array on all devices: of elements, scales or shifts.
        """
        if shape == self.whole:
            return 1, 1
        is_wide = shape[self.axis :][:1] == self.whole[self.axis :][:1]
        is_shifts = len(shape) > 1 and is_wide
        return (self.group_size, 1) if is_shifts else (1, self.block_size)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the shard of an array on all devices."""
        return shape_in_blocks(self.shape, *self.block_of(shape)) if shape else ()


def shape_in_blocks(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of an array with an entry for each block of rows and columns."""
    *leading, height, width = 1, *shape
    return (*leading, -(-height // rows), -(-width // columns))[-len(shape) :]


@dataclass(frozen=True)
class Evaluator(ABC):
    """Evaluates equations on some elements of a part, their scales and shifts."""

    part: Part

    @abstractmethod
    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of an array: elements, scales or shifts."""

    @abstractmethod
    def index(self, axis: int) -> jax.Array:
        """Return the indices in the whole array along an axis of the part."""

    @abstractmethod
    def spread(self, scales: jax.Array, axis: int) -> jax.Array:
        """Return for each element the scale of its block along an axis, -1 or -2."""

    @abstractmethod
    def largest(self, values: jax.Array, axis: int) -> jax.Array:
        """Return the largest value of each block along an axis, -1 or -2."""

    def run_all(self, end: End, values: dict[Value, Any]) -> None:
        """Evaluate the equations of an end for this part; add results to `values`."""
        for node in end.nodes:
            inputs = [read(values, x) for x in node.inputs]
            values.update(zip(node.outputs, self.run(node, inputs), strict=True))

    def run(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of an elementwise equation for this part."""
        # Equations that name a shape need another one for a part: constants, indices,
        # and operations between elements and blocks. All others have the shape of
        # their inputs.
        equation, aval = node.equation, node.outputs[0].aval
        name = equation.primitive.name
        if is_block_operation(equation):
            axis = self.part.place_of(blocks_in(equation).axis) - aval.ndim
            if equation.params["kind"] == SPREAD:
                return [self.spread(inputs[0], axis)]
            return [self.largest(inputs[0], axis)]
        if not aval.ndim:
            return bind(equation, inputs)
        shape = self.shape_of(aval.shape)
        if name == "broadcast_in_dim":
            return [self.full(shape, inputs[0], aval.dtype)]
        if name == "iota":
            at = self.index(self.part.place_of(equation.params["dimension"]))
            return [lax.bitcast_convert_type(at, aval.dtype)]
        if name in ("pvary", "pcast"):  # says over which axes of a mesh a value varies
            return list(inputs)
        return self.bind(equation, inputs, shape)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
        """Return a constant array."""
        return jnp.full(shape, value, dtype)

    def bind(
        self, equation: Any, inputs: Sequence[Any], shape: tuple[int, ...]
    ) -> list[Any]:
        """Return the outputs of an equation that does the same to all elements."""
        return bind(equation, inputs)


# The dtypes of what kernels read and compute.
DTYPES = frozenset(
    """bool int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32""".split()
)
_NARROW_FLOATS = ("bfloat16", "float16")


class KernelEvaluator(Evaluator):
    """Evaluates equations on what a kernel computes at once."""

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
        """Return a constant array of a dtype, as it is held."""
        return jnp.full(shape, value, held_dtype(dtype))

    def bind(
        self, equation: Any, inputs: Sequence[Any], shape: tuple[int, ...]
    ) -> list[Any]:
        """Return the outputs of an equation that does the same to all elements."""
        name = equation.primitive.name
        old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        if name == "convert_element_type":
            return [_convert(inputs[0], old, new)]
        if name == "bitcast_convert_type":
            return [_bitcast(inputs[0], old, new)]
        if name == "round":
            return [_round(inputs[0], equation.params["rounding_method"])]
        if name == "sign":
            return [_sign(inputs[0])]
        if name == "is_finite":  # Triton has none in JAX 0.8
            return [jnp.abs(inputs[0]) < jnp.inf]
        if name == "reduce_precision":
            return [reduce_precision(inputs[0], equation.params)]
        if name == "shift_right_logical" and old.itemsize < 4:
            raise NotImplementedError(f"a kernel does not shift {old}")
        if len(inputs) > 1:
            # Kernels take no scalars beside arrays.
            inputs = [
                x if jnp.ndim(x) else self.full(shape, x, atom.aval.dtype)
                for x, atom in zip(inputs, equation.invars, strict=True)
            ]
        if name == "select_n" and old != jnp.bool_:  # one of the branches of a `cond`
            which, chosen, *others = inputs
            for i, other in enumerate(others, start=1):
                chosen = jnp.where(which == i, other, chosen)
            return [chosen]
        return [_as(new, x) for x in bind(equation, inputs)]


def dtype_obstacle(end: End, dtypes: Collection[str]) -> str | None:
    """Return that an end reads or computes in a dtype outside of `dtypes`, or None."""
    made = [value for node in end.nodes for value in node.outputs]
    names = (value.aval.dtype.name for value in [*end.reads, *made])
    return next((f"computes in {x}" for x in names if x not in dtypes), None)


def held_dtype(dtype: Any) -> Any:
    """Return the dtype in which values of a dtype are held."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise NotImplementedError(f"a kernel does not compute in {dtype}")
    if dtype.itemsize == 4 or dtype == jnp.bool_:
        return dtype
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


def as_read(x: jax.Array) -> jax.Array:
    """Return an array as a kernel reads it: booleans are integers in its memory."""
    return x.astype(jnp.int8) if x.dtype == jnp.bool_ else x


def hold(x: jax.Array, dtype: Any) -> jax.Array:
    """Return an array of a dtype that was read, in the dtype in which it is held."""
    held = x.astype(held_dtype(x.dtype))
    return held != 0 if dtype == jnp.bool_ else held


def aliases(end: End) -> dict[int, int]:
    """Return which outputs overwrite what an end reads.

    Booleans are read as integers: from a copy, which an output cannot overwrite.
    """
    replaced = end.replaced.items()
    return {at: out for out, at in replaced if end.reads[at].aval.dtype != jnp.bool_}


def _as(dtype: Any, x: jax.Array) -> jax.Array:
    """Return a held value as an operation in a dtype would: wrapped, or rounded."""
    if dtype.name in _NARROW_FLOATS:
        return x.astype(dtype).astype(jnp.float32)
    if not _is_narrow_integer(dtype):
        return x
    unused = 32 - bits(dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return x & (0xFFFFFFFF >> unused)
    return (x << unused) >> unused


def _convert(x: jax.Array, old: Any, new: Any) -> jax.Array:
    """Return `x` in another dtype."""
    held = held_dtype(new)
    if new == jnp.bool_:
        return x != 0
    if jnp.uint32 in (old, new) and jnp.issubdtype(old, jnp.floating) != (
        jnp.issubdtype(new, jnp.floating)
    ):
        raise NotImplementedError(f"a kernel does not convert {old} to {new}")
    if old == jnp.bool_:
        x = jnp.where(x, jnp.int32(1), jnp.int32(0))
    if jnp.issubdtype(new, jnp.floating):
        return _as(new, x.astype(jnp.float32))
    if jnp.issubdtype(old, jnp.floating):
        if _is_narrow_integer(new):
            bounds = jnp.iinfo(new)
            x = jnp.clip(x, float(bounds.min), float(bounds.max))
        return x.astype(held)
    return _as(new, x if x.dtype == held else lax.bitcast_convert_type(x, held))


def _bitcast(x: jax.Array, old: Any, new: Any) -> jax.Array:
    """Return the bits of `x` as another dtype of the same width."""
    if old.itemsize == 4:
        return lax.bitcast_convert_type(x, new)
    # Only in Triton: `_tpu.obstacle` refuses float16.
    if old == jnp.float16:
        bits = lax.bitcast_convert_type(x.astype(old), jnp.int16)
        return _as(new, bits.astype(jnp.int32))
    if new == jnp.float16:
        return lax.bitcast_convert_type(x.astype(jnp.int16), new).astype(jnp.float32)
    # A bfloat16 is the upper half of a float32.
    if old == jnp.bfloat16:
        return _as(new, lax.bitcast_convert_type(x, jnp.int32) >> 16)
    if new == jnp.bfloat16:
        return lax.bitcast_convert_type(x << 16, jnp.float32)
    return _as(new, x)


def _is_narrow_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4


def _sign(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x))


def _round(x: jax.Array, method: Any) -> jax.Array:
    """Round to whole numbers, which Triton has no operation for."""
    if method != lax.RoundingMethod.TO_NEAREST_EVEN:
        raise NotImplementedError(f"a kernel does not round {method}")
    # To the nearest, and from halfway to the even neighbour.
    below = jnp.floor(x)
    rest = x - below
    is_odd = below - 2 * jnp.floor(below * 0.5) == 1
    return jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), below + 1, below)


def reduce_precision(x: jax.Array, params: Any) -> jax.Array:
    """Round to fewer bits, which neither Mosaic nor Triton has an operation for."""
    if x.dtype != jnp.float32 or params["exponent_bits"] != 8:
        raise NotImplementedError(f"a kernel does not round {x.dtype} to {params}")
    dropped = 23 - params["mantissa_bits"]
    if dropped <= 0:
        return x
    if dropped == 16:
        return x.astype(jnp.bfloat16).astype(jnp.float32)
    # Adding half a unit less one carries into the kept bits from above halfway. If the
    # last kept bit is odd, one more is added, so that halfway also carries.
    unit = 1 << dropped
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    is_odd = (pattern >> dropped) & 1
    pattern = (pattern + (unit // 2 - 1) + is_odd) & -unit
    rounded = lax.bitcast_convert_type(pattern, jnp.float32)
    return jnp.where(jnp.isnan(x), x, rounded)
