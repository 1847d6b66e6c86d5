"""Evaluate elementwise equations on a part of the arrays of a leaf."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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

    def has_shifts(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of this shape, on all devices, is one of shifts."""
        is_whole = shape[self.axis :][:1] == self.whole[self.axis :][:1]
        return len(shape) > 1 and shape != self.whole and is_whole

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the shard of an array: elements, scales or shifts."""
        if shape == self.whole or not shape:
            return self.shape if shape else ()
        *leading, length = self.shape
        if self.has_shifts(shape):
            return (*leading[:-1], -(-leading[-1] // self.group_size), length)
        return (*leading, -(-length // self.block_size))


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
