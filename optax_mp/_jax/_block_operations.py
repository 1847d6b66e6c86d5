"""The operations between the elements of an array and the scales of its blocks.

They are primitives that know their blocks. So the engine can treat them as elementwise,
and compute them for a part of an array.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp._jax._primitives import Primitive, ad, batching, mlir

SPREAD, LARGEST = "spread", "largest"


@dataclass(frozen=True)
class Blocks:
    """The blocks of an array, along one axis.

    Attributes:
        axis: the axis.
        size: how many elements a block has; the last one may have fewer.
        length: how many elements the array has along the axis.
    """

    axis: int
    size: int
    length: int

    @property
    def count(self) -> int:
        """Return how many blocks there are along the axis."""
        return -(-self.length // self.size)

    def largest(self, values: jax.Array) -> jax.Array:
        """Return the largest of the integers of each block, or 0."""
        return _operation.bind(values, kind=LARGEST, blocks=self)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Return for each value the scale of its block."""
        return _operation.bind(scales, kind=SPREAD, blocks=self)


# The name of a block operation. Among its parameters are a `kind` and its `blocks`.
NAME = "optax_mp_blocks"
_operation = Primitive(NAME)


def _compute(x: jax.Array, *, kind: str, blocks: Blocks) -> jax.Array:
    return _spread(x, blocks) if kind == SPREAD else _largest(x, blocks)


def _largest(values: jax.Array, blocks: Blocks) -> jax.Array:
    missing = blocks.count * blocks.size - blocks.length
    if missing:
        widths = [(0, 0, 0)] * values.ndim
        widths[blocks.axis] = (0, missing, 0)
        values = lax.pad(values, np.zeros((), values.dtype), widths)
    shape = list(values.shape)
    shape[blocks.axis : blocks.axis + 1] = [blocks.count, blocks.size]
    return lax.reduce_max(lax.reshape(values, shape), (blocks.axis + 1,))


# The scales are repeated instead of reshaping the values to blocks, so that XLA can
# overwrite the codes in place.
def _spread(scales: jax.Array, blocks: Blocks) -> jax.Array:
    shape = list(scales.shape)
    shape.insert(blocks.axis + 1, blocks.size)
    dimensions = [i for i in range(len(shape)) if i != blocks.axis + 1]
    repeated = lax.broadcast_in_dim(scales, shape, dimensions)
    shape[blocks.axis : blocks.axis + 2] = [blocks.count * blocks.size]
    repeated = lax.reshape(repeated, shape)
    if shape[blocks.axis] == blocks.length:
        return repeated
    return lax.slice_in_dim(repeated, 0, blocks.length, axis=blocks.axis)


@_operation.def_abstract_eval
def _abstract(aval: Any, *, kind: str, blocks: Blocks) -> Any:
    shape = list(aval.shape)
    shape[blocks.axis] = blocks.length if kind == SPREAD else blocks.count
    return aval.update(shape=tuple(shape), weak_type=False)


def _batched(args: Any, axes: Any, *, kind: str, blocks: Blocks) -> Any:
    moved = replace(blocks, axis=blocks.axis + 1)
    x = jnp.moveaxis(args[0], axes[0], 0)
    return _operation.bind(x, kind=kind, blocks=moved), 0


_operation.def_impl(jax.jit(_compute, static_argnames=("kind", "blocks")))
batching.primitive_batchers[_operation] = _batched
# To spread is linear, and integers have no tangents.
ad.defjvp(_operation, lambda dot, _, **params: _compute(dot, **params))
mlir.register_lowering(_operation, mlir.lower_fun(_compute, multiple_results=False))
