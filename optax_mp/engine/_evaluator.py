"""Evaluate elementwise equations on a part of the arrays of a leaf.

All values are 32 bits wide in a kernel, whatever their dtype, because TPUs and GPUs
have few operations on narrower ones, and these differ among generations. Integers of 8
and 16 bits are held as int32, and 16-bit floats as float32, rounded after each
operation. An equation that a kernel's evaluator does not know raises; then XLA computes
it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import bits
from optax_mp._jax._block_operations import NAME, SPREAD
from optax_mp._jax._contact import result_like
from optax_mp._jax._jaxpr import Equation
from optax_mp.engine._layout import Part
from optax_mp.engine._program import Node, Value, read_inputs
from optax_mp.engine._tails import ElementwiseTail

Refs = dict[Value, Any]


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

    def run_all(self, tail: ElementwiseTail, values: dict[Value, Any]) -> None:
        """Evaluate the equations of a tail for this part; add results to `values`."""
        for node in tail.nodes:
            (output,) = node.outputs
            values[output] = self._run(node, read_inputs(values, node))

    def _run(self, node: Node, inputs: Sequence[Any]) -> jax.Array:
        """Return the output of an elementwise equation for this part."""
        # Equations that name a shape need another one for a part: constants, indices,
        # and operations between elements and blocks. All others have the shape of
        # their inputs.
        equation, aval = node.equation, node.outputs[0].aval
        name = equation.primitive.name
        if name == "broadcast_in_dim":
            return self.full(inputs[0], aval)
        if name == "iota":
            at = self.index(self.part.place_of(equation.params["dimension"]))
            return lax.bitcast_convert_type(at, aval.dtype)
        # To other memory, or a type that names the axes of a mesh where it varies.
        if name in ("device_put", "pvary", "pcast"):
            return inputs[0]
        if name == NAME:
            axis = self.part.place_of(equation.params["blocks"].axis) - aval.ndim
            is_spread = equation.params["kind"] == SPREAD
            return (self.spread if is_spread else self.largest)(inputs[0], axis)
        return self.compute(equation, inputs)

    def full(self, value: Any, aval: Any) -> jax.Array:
        """Return this part of an array of equal numbers, of a type."""
        return jnp.full(self.shape_of(aval.shape), value, aval.dtype)

    def compute(self, equation: Equation, inputs: Sequence[Any]) -> jax.Array:
        """Return the output of an equation that does the same to all elements."""
        return equation.primitive.bind(*inputs, **equation.params)


# The dtypes of what kernels read and compute.
DTYPES = frozenset(
    """bool int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32""".split()
)


class KernelEvaluator(Evaluator):
    """Evaluates equations on what a kernel computes at once.

    Attributes:
        packs: whether all numbers are given in two arrays, of int32 and float32, and
            not each in its own array.
    """

    packs: ClassVar[bool] = False

    @abstractmethod
    def view_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the kernel gets the part of an array as."""

    @abstractmethod
    def run_piece(
        self, tail: ElementwiseTail, values: Refs, inputs: Refs, outputs: Refs
    ) -> None:
        """Compute what one program of the grid does.

        Args:
            tail: the tail.
            values: the numbers that it reads.
            inputs: references to the arrays that it reads.
            outputs: references to its outputs.
        """

    def call(
        self, pallas_call: Any, tail: ElementwiseTail, args: Any, **settings: Any
    ) -> list[Any]:
        """Return the outputs of a tail by a kernel, in the shapes of `view_of`.

        Args:
            pallas_call: makes the kernel.
            tail: the tail.
            args: the values of what it reads.
            **settings: of `pallas_call`. Its inputs are the numbers, of the part's
                `origin` and those that the tail reads, and then the arrays.
        """
        given = dict(zip(tail.reads, map(jnp.asarray, args), strict=True))
        arrays = [value for value in given if value.aval.ndim]
        singles = [value for value in given if not value.aval.ndim]
        rank = len(self.part.shape)
        numbers = [*self.part.origin, *(given[value] for value in singles)]
        packed, places = _in_arrays(list(map(_in_32_bits, numbers)), packs=self.packs)

        def run(*refs: Any) -> None:
            read = [refs[which][i] for which, i in places]
            inputs = dict(zip(arrays, refs[len(packed) :], strict=False))
            outputs = dict(zip(tail.outputs, refs[-len(tail.outputs) :], strict=True))
            values = {
                value: to_register_dtype(x, value.aval.dtype)
                for value, x in zip(singles, read[rank:], strict=True)
            }
            here = replace(self.part, origin=tuple(read[:rank]))
            replace(self, part=here).run_piece(tail, values, inputs, outputs)

        # Kernels know no booleans in memory. No output can overwrite a copy.
        bools = [value for value in arrays if value.aval.dtype == jnp.bool_]
        given |= {value: given[value].astype(jnp.int8) for value in bools}
        replaced = [(i, tail.reads[read]) for i, read in tail.replaced.items()]
        return pallas_call(
            run,
            out_shape=[
                result_like(x.aval, self.view_of(x.aval.shape)) for x in tail.outputs
            ],
            input_output_aliases={
                len(packed) + arrays.index(x): i for i, x in replaced if x not in bools
            },
            **settings,
        )(*packed, *(given[x].reshape(self.view_of(x.aval.shape)) for x in arrays))

    def full(self, value: Any, aval: Any) -> jax.Array:
        """Return this part of an array of equal numbers, as it is held."""
        shape = self.shape_of(aval.shape)
        return jnp.full(shape, value, register_dtype(aval.dtype))

    def compute(self, equation: Equation, inputs: Sequence[Any]) -> jax.Array:
        """Return the output of an equation that does the same to all elements."""
        name, x = equation.primitive.name, inputs[0]
        made = equation.outvars[0].aval
        old, new = equation.invars[0].aval.dtype, made.dtype
        if name == "convert_element_type":
            return _convert(x, old, new)
        if name == "bitcast_convert_type":
            return _bitcast(x, old, new)
        if name == "round":
            return _round(x, equation.params["rounding_method"])
        if name == "sign":
            return _sign(x)
        if name == "is_finite":  # Triton has none in JAX 0.8
            return jnp.abs(x) < jnp.inf
        if name == "reduce_precision":
            return reduce_precision(x, equation.params)
        if name == "shift_right_logical" and old.itemsize < 4:
            raise NotImplementedError(f"a kernel does not shift {old}")
        if len(inputs) > 1:
            # Kernels take no scalars beside arrays.
            inputs = [
                x if jnp.ndim(x) else self.full(x, made.update(dtype=atom.aval.dtype))
                for x, atom in zip(inputs, equation.invars, strict=True)
            ]
        if name == "select_n" and old != jnp.bool_:  # one of the branches of a `cond`
            which, chosen, *others = inputs
            for i, other in enumerate(others, start=1):
                chosen = jnp.where(which == i, other, chosen)
            return chosen
        return _wrap_or_round(new, super().compute(equation, inputs))


def dtype_obstacle(tail: ElementwiseTail, dtypes: frozenset[str]) -> str | None:
    """Return that a tail reads or computes in a dtype outside of `dtypes`, or None."""
    made = [value for node in tail.nodes for value in node.outputs]
    others = {value.aval.dtype.name for value in [*tail.reads, *made]} - dtypes
    return f"computes in {min(others)}" if others else None


def register_dtype(dtype: Any) -> Any:
    """Return the dtype that holds values of one of `DTYPES`."""
    if dtype.itemsize == 4 or dtype == jnp.bool_:
        return dtype
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


def to_register_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """Return what was read of an array of a dtype, as a kernel holds it."""
    if dtype == jnp.bool_:  # an integer in memory
        return x.astype(jnp.int32) != 0
    return x.astype(register_dtype(dtype))


def _in_arrays(
    numbers: Sequence[jax.Array], *, packs: bool
) -> tuple[list[jax.Array], list[tuple[int, int]]]:
    """Return numbers in arrays, and where each is: which array, and its place there."""
    if not packs:
        return [x.reshape(1) for x in numbers], [(i, 0) for i in range(len(numbers))]
    # Integers and floats. Both have a place for each, since Mosaic of JAX 0.8 cannot
    # read the bits of one as the other.
    packed = [
        jnp.stack([x if x.dtype == dtype else jnp.zeros((), dtype) for x in numbers])
        for dtype in (jnp.int32, jnp.float32)
    ]
    return packed, [(int(x.dtype == jnp.float32), i) for i, x in enumerate(numbers)]


def _in_32_bits(x: Any) -> jax.Array:
    """Return a number as int32 or float32."""
    x = jnp.asarray(x)
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.int32)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32 if is_float else jnp.int32)


def _wrap_or_round(dtype: Any, x: jax.Array) -> jax.Array:
    """Return a held value as an operation in a dtype would: wrapped, or rounded."""
    if dtype.itemsize == 4 or dtype == jnp.bool_:
        return x
    if jnp.issubdtype(dtype, jnp.floating):
        return x.astype(dtype).astype(jnp.float32)
    unused = 32 - bits(dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return x & (0xFFFFFFFF >> unused)
    return (x << unused) >> unused


def _convert(x: jax.Array, old: Any, new: Any) -> jax.Array:
    """Return `x` in another dtype."""
    held = register_dtype(new)
    if new == jnp.bool_:
        return x != 0
    from_float, to_float = (jnp.issubdtype(x, jnp.floating) for x in (old, new))
    if jnp.uint32 in (old, new) and from_float != to_float:
        raise NotImplementedError(f"a kernel does not convert {old} to {new}")
    if old == jnp.bool_:
        x = jnp.where(x, jnp.int32(1), jnp.int32(0))
    if to_float:
        return _wrap_or_round(new, x.astype(jnp.float32))
    if from_float:
        if new.itemsize < 4:
            bounds = jnp.iinfo(new)
            x = jnp.clip(x, float(bounds.min), float(bounds.max))
        return x.astype(held)
    return _wrap_or_round(
        new, x if x.dtype == held else lax.bitcast_convert_type(x, held)
    )


def _bitcast(x: jax.Array, old: Any, new: Any) -> jax.Array:
    """Return the bits of `x` as another dtype of the same width."""
    if old.itemsize == 4:
        return lax.bitcast_convert_type(x, new)
    # Only in Triton: `_tpu.obstacle` refuses float16.
    if old == jnp.float16:
        bits = lax.bitcast_convert_type(x.astype(old), jnp.int16)
        return _wrap_or_round(new, bits.astype(jnp.int32))
    if new == jnp.float16:
        return lax.bitcast_convert_type(x.astype(jnp.int16), new).astype(jnp.float32)
    # A bfloat16 is the upper half of a float32.
    if old == jnp.bfloat16:
        return _wrap_or_round(new, lax.bitcast_convert_type(x, jnp.int32) >> 16)
    if new == jnp.bfloat16:
        return lax.bitcast_convert_type(x << 16, jnp.float32)
    return _wrap_or_round(new, x)


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
