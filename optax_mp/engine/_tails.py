"""Split a step into the elementwise tail of each leaf, and what comes before.

Elementwise: an element of an output depends on the elements at its place in arrays of
one shape, on scalars, and on the scale of its block.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp

from optax_mp._jax._arrays import is_host_type, moves_memory
from optax_mp._jax._block_operations import NAME, Blocks
from optax_mp._jax._control_flow import PLAIN_CALLS
from optax_mp._jax._jaxpr import (
    Equation,
    Jaxpr,
    cache_by_jaxpr,
    groups_with_common,
    jaxprs_within,
    open_jaxpr,
)
from optax_mp._jax._primitives import IN_KERNELS
from optax_mp.engine._program import (
    Node,
    Program,
    Value,
    backward_slice,
    reads_of,
    values_in,
)

# How it is split. Walk backwards from each array that the step returns, as
# long as the equations are elementwise. The equations on the way are its tail. The
# tail reads the values where the walk stops: inputs of the step (the gradient,
# the codes), and results of equations that are not elementwise (a global norm, a
# matrix product, a key for random numbers).
#
# The tails of a leaf's param, remainder, moments and scales overlap: all contain
# the equations that dequantize the moments. Tails that overlap become one. Three
# things must not connect leaves, or the whole step would be one tail: the walk stops
# at single numbers, such as a learning rate, and at equations that are not
# elementwise; and each tail makes its own arrays of constants, such as zeros.

NO_LOW_BITS = "no low-bit arrays"
_SMALLEST_SIZE = 4096
# Also from a factor of rows to a matrix, where they are no part of a tail.
_BROADCASTING = IN_KERNELS | {"broadcast_in_dim"}


@dataclass(frozen=True)
class ElementwiseTail:
    """The elementwise tail of a step for one leaf, or for several that meet in it.

    Attributes:
        nodes: its equations, in order.
        reads: what it reads: inputs of the step, or values computed before.
        outputs: the outputs of the step that it computes.
        replaced: outputs that overwrite an input: their index in `outputs`, and the
            index of that input in `reads`.
        shape: of its elements.
        block_size: how many elements along an axis share a scale; 1 without scales.
        axis: that axis, or the last one.
        group_size: how many along the last of the other axes share a shift; 1 without
            shifts.
        unsplittable_because: why it cannot be split; None if it can. Then all arrays
            have one shape, or are scales along its axis, or shifts along the other.
        reads_repeated: whether it reads factors of rows or columns, as of a factored
            moment. XLA would write them out as whole arrays for a kernel.
        obstacle: why it has no kernel on any platform, or None.
    """

    nodes: Sequence[Node]
    reads: Sequence[Value]
    outputs: Sequence[Value]
    replaced: dict[int, int]
    shape: tuple[int, ...]
    block_size: int
    axis: int
    group_size: int
    unsplittable_because: str | None
    reads_repeated: bool
    obstacle: str | None


def split_tails(
    program: Program, replaced: Mapping[Value, Value]
) -> list[ElementwiseTail]:
    """Return the tails of a program.

    Args:
        program: the program.
        replaced: which input an output takes the place of.
    """
    made = [(x, node) for node in program.nodes for x in node.outputs]
    stops = {
        x for x, node in made if not (x.aval.ndim and _is_elementwise(node.equation))
    }
    stops.update(program.inputs, program.constants)
    outputs = [x for x in dict.fromkeys(values_in(program.outputs)) if x not in stops]
    read_arrays = {node for node in program.nodes for x in node.reads if x.aval.ndim}
    touched = []
    for value in outputs:
        nodes = backward_slice([value], stops.__contains__)
        arrays = {read for read in reads_of(nodes) if read.aval.ndim}
        touched.append(arrays | read_arrays.intersection(nodes))
    tails = []
    for group in groups_with_common(touched):
        together = [outputs[i] for i in group]
        nodes = backward_slice(together, stops.__contains__)
        tails.append(_tail_of(nodes, together, replaced))
    return tails


def _tail_of(
    nodes: Sequence[Node], outputs: Sequence[Value], replaced: Mapping[Value, Value]
) -> ElementwiseTail:
    """Return the tail with these equations and outputs."""
    shape = max((value.aval.shape for value in outputs), key=math.prod)
    equations = [node.equation for node in nodes]
    blocks = [x.params["blocks"] for x in equations if x.primitive.name == NAME]
    reads = reads_of(nodes)
    old = [overwritten_by(value, replaced) for value in outputs]
    # The first operation is on scales. Shifts are along another axis.
    axis = blocks[0].axis if blocks else len(shape) - 1
    unsplittable_because = _unsplittable_because(nodes, blocks, shape, axis)
    return ElementwiseTail(
        nodes=nodes,
        reads=reads,
        outputs=outputs,
        replaced={i: reads.index(x) for i, x in enumerate(old) if x in reads},
        shape=shape,
        block_size=max((x.size for x in blocks if x.axis == axis), default=1),
        axis=axis,
        group_size=max((x.size for x in blocks if x.axis != axis), default=1),
        unsplittable_because=unsplittable_because,
        reads_repeated=any(map(_is_repeated, reads)),
        obstacle=_obstacle(outputs, shape) or unsplittable_because,
    )


def _is_repeated(value: Value) -> bool:
    """Return whether a value is made of factors of rows or columns."""
    node = value.producer
    if node is None or node.equation.primitive.name not in _BROADCASTING:
        return False
    return any(1 < x.aval.size < value.aval.size for x in node.reads)


def overwritten_by(output: Value, replaced: Mapping[Value, Value]) -> Value | None:
    """Return the input whose buffer an output can take, if there is one."""
    old, aval = replaced.get(output), output.aval
    if old is None or (old.aval.shape, old.aval.dtype) != (aval.shape, aval.dtype):
        return None
    return old if is_host_type(old.aval) == is_host_type(aval) else None


def _obstacle(outputs: Sequence[Value], shape: tuple[int, ...]) -> str | None:
    """Return why a kernel would not pay, or None."""
    # If all arrays are floats, XLA makes one kernel itself.
    dtypes = [value.aval.dtype for value in outputs]
    if not any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        return NO_LOW_BITS
    if math.prod(shape) < _SMALLEST_SIZE:
        return f"under {_SMALLEST_SIZE} elements"
    return None


def _unsplittable_because(
    nodes: Sequence[Node], blocks: Sequence[Blocks], shape: tuple[int, ...], axis: int
) -> str | None:
    """Return why a tail cannot be split; None if it can."""
    if len({(x.size, x.axis) for x in blocks}) > len({x.axis for x in blocks}):
        return "blocks of several sizes"
    if not {x.axis for x in blocks} <= {axis, *axis_of_groups(len(shape), axis)}:
        return "blocks along several axes"
    # Scales and shifts have the shape of their elements but for one axis.
    shapes = {shape}
    shapes |= {(*shape[: x.axis], x.count, *shape[x.axis + 1 :]) for x in blocks}
    made = {value.aval.shape for node in nodes for value in node.outputs}
    return None if made <= shapes else "arrays of several shapes"


def axis_of_groups(rank: int, axis: int) -> list[int]:
    """Return the axis along which elements share shifts: the last without blocks.

    Empty if there is no other axis.
    """
    return [i for i in range(rank) if i != axis][-1:]


def _is_elementwise(equation: Equation) -> bool:
    name, outputs = equation.primitive.name, equation.outvars
    if name in PLAIN_CALLS:  # one that a program does not open
        return _has_elementwise(open_jaxpr(jaxprs_within(equation)[0])[0])
    if name in IN_KERNELS:
        shape = outputs[0].aval.shape
        allowed = {shape} if name == "bitcast_convert_type" else {(), shape}
        shapes = {x.aval.shape for x in equation.invars}
        return len(outputs) == 1 and shapes <= allowed
    if name == "broadcast_in_dim":
        return not equation.invars[0].aval.shape
    if name == "device_put":
        return moves_memory(equation)
    return name in ("iota", NAME)


@cache_by_jaxpr
def _has_elementwise(jaxpr: Jaxpr) -> bool:
    """Return whether a function is elementwise, but for operations on numbers."""
    return all(
        _is_elementwise(x) or all(atom.aval.size <= 1 for atom in x.invars)
        for x in cast(list[Any], jaxpr.eqns)
    )
