"""Cut a step into the elementwise end of each leaf, and what comes before.

Elementwise: an element of an output depends on the elements at its place in arrays of
one shape, on scalars, and on the scale of its block.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from optax_mp._jax._block_operations import Blocks, blocks_in, is_block_operation
from optax_mp._jax._jaxpr import groups_with_common
from optax_mp._jax._memory import is_host_type, moves_memory
from optax_mp._jax._primitives import IN_KERNELS
from optax_mp.leafwise._program import (
    Node,
    Program,
    Value,
    reads_of,
    values_in,
)

# How the cut is found. Walk backwards from each array that the step returns, as
# long as the equations are elementwise. The equations on the way are its end. The
# end reads the values at which the walk stops: inputs of the step (the gradient,
# the codes), and results of equations that are not elementwise (a global norm, a
# matrix product, a key for random numbers).
#
# The ends of a leaf's param, remainder, moments and scales overlap: all contain
# the equations that dequantize the moments. Ends that overlap become one end. Three
# things must not connect leaves, or the whole step would be one end: the walk stops
# at single numbers, such as a learning rate, and at equations that are not
# elementwise; and each end makes its own arrays of constants, such as zeros.

NO_LOW_BITS = "no low-bit arrays"
_SMALLEST_SIZE = 4096
# Also from a factor of rows to a matrix, where they are no part of an end.
_BROADCASTING = IN_KERNELS | {"broadcast_in_dim"}


@dataclass(frozen=True)
class End:
    """The elementwise end of a step for one leaf, or for several that meet in it.

    Attributes:
        nodes: its equations, in order.
        reads: what it reads: inputs of the step, or values computed before.
        outputs: the outputs of the step that it computes.
        replaced: outputs that overwrite an input: their index in `outputs`, and the
            index of that input in `reads`.
        shape: of its elements.
        block_size: how many elements along an axis share a scale, if any do.
        axis: that axis, or the last one.
        group_size: how many along the last of the other axes share a shift, if any do.
        entangled: why no part of its arrays can be computed alone. None if any part can
            be: all arrays have one shape, or are scales along its axis, or shifts along
            the other.
        reads_repeated: whether it reads factors of rows or columns, as of a factored
            moment. XLA would write them out as whole arrays for a kernel.
        obstacle: why it has no kernel on any platform, or None.
    """

    nodes: list[Node]
    reads: list[Value]
    outputs: list[Value]
    replaced: dict[int, int]
    shape: tuple[int, ...]
    block_size: int | None
    axis: int
    group_size: int | None
    entangled: str | None
    reads_repeated: bool
    obstacle: str | None


def cut(program: Program, replaced: Mapping[Value, Value]) -> list[End]:
    """Return the ends of a program.

    Args:
        program: the program.
        replaced: which input an output takes the place of.
    """
    fits = [_fits(node) for node in program.nodes]

    def stops_at(value: Value) -> bool:
        at = value.made_at
        return at is None or not value.aval.ndim or not fits[at]

    outputs = [x for x in dict.fromkeys(values_in(program.outputs)) if not stops_at(x)]
    touched: list[set[Any]] = []
    for value in outputs:
        nodes, reads = program.behind([value], stops_at)
        arrays = (read for read in reads if read.aval.ndim)
        touched.append({*arrays, *filter(_reads_arrays, nodes)})
    ends = []
    for group in groups_with_common(touched):
        together = [outputs[at] for at in group]
        nodes, _ = program.behind(together, stops_at)
        ends.append(_end(program, nodes, together, replaced))
    return ends


def _reads_arrays(node: Node) -> bool:
    return any(value.aval.ndim for value in values_in(node.inputs))


def _end(
    program: Program,
    nodes: list[Node],
    outputs: list[Value],
    replaced: Mapping[Value, Value],
) -> End:
    """Return the end with these equations and outputs."""
    shape = max((value.aval.shape for value in outputs), key=math.prod)
    blocks = [blocks_in(n.equation) for n in nodes if is_block_operation(n.equation)]
    reads = reads_of(nodes)
    place_of = {value: i for i, value in enumerate(reads)}
    old = [overwritten_by(value, replaced) for value in outputs]
    # The first operation is on scales. Shifts are along another axis.
    axis = blocks[0].axis if blocks else len(shape) - 1
    groups = [x for x in blocks if x.axis != axis]
    entangled = _entangled(nodes, blocks, shape, axis)
    return End(
        nodes=nodes,
        reads=reads,
        outputs=outputs,
        replaced={at: place_of[x] for at, x in enumerate(old) if x in place_of},
        shape=shape,
        block_size=max((x.size for x in blocks if x.axis == axis), default=None),
        axis=axis,
        group_size=groups[0].size if groups else None,
        entangled=entangled,
        reads_repeated=any(_is_repeated(program, value) for value in reads),
        obstacle=_obstacle(outputs, shape) or entangled,
    )


def _is_repeated(program: Program, value: Value) -> bool:
    """Return whether a value is made of factors of rows or columns."""
    if value.made_at is None:
        return False
    node, size = program.nodes[value.made_at], value.aval.size
    sizes = [x.aval.size for x in values_in(node.inputs)]
    is_broadcasting = node.equation.primitive.name in _BROADCASTING
    return is_broadcasting and any(1 < x < size for x in sizes)


def overwritten_by(output: Value, replaced: Mapping[Value, Value]) -> Value | None:
    """Return the input whose buffer an output can take, if there is one."""
    old, aval = replaced.get(output), output.aval
    if old is None or (old.aval.shape, old.aval.dtype) != (aval.shape, aval.dtype):
        return None
    return old if is_host_type(old.aval) == is_host_type(aval) else None


def _obstacle(outputs: Sequence[Value], shape: tuple[int, ...]) -> str | None:
    """Return why a kernel would not pay."""
    # If all arrays are floats, XLA makes one kernel itself.
    dtypes = [value.aval.dtype for value in outputs]
    if not any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        return NO_LOW_BITS
    if math.prod(shape) < _SMALLEST_SIZE:
        return f"under {_SMALLEST_SIZE} elements"
    return None


def _entangled(
    nodes: list[Node], blocks: list[Blocks], shape: tuple[int, ...], axis: int
) -> str | None:
    """Return why no part of the arrays of an end can be computed alone."""
    if len({(x.size, x.axis) for x in blocks}) > len({x.axis for x in blocks}):
        return "blocks of several sizes"
    behind = [x for x in range(len(shape)) if x != axis][-1:]
    if not {x.axis for x in blocks} <= {axis, *behind}:
        return "blocks along several axes"
    # Scales and shifts have the shape of their elements but for one axis.
    shapes = {shape}
    shapes |= {(*shape[: x.axis], x.count, *shape[x.axis + 1 :]) for x in blocks}
    made = {value.aval.shape for node in nodes for value in node.outputs}
    return None if made <= shapes else "arrays of several shapes"


def _fits(node: Node) -> bool:
    """Return whether an equation is elementwise."""
    equation = node.equation
    name = equation.primitive.name
    if is_block_operation(equation) or name == "iota":
        return True
    if name == "broadcast_in_dim":
        return not equation.invars[0].aval.shape
    if name == "device_put":
        return moves_memory(equation)
    if name not in IN_KERNELS or len(equation.outvars) != 1:
        return False
    shape = equation.outvars[0].aval.shape
    if name == "bitcast_convert_type":
        return equation.invars[0].aval.shape == shape
    return all(a.aval.shape in ((), shape) for a in equation.invars)
