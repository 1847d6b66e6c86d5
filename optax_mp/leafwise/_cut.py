"""Cut a step into the elementwise end of each leaf, and what comes before.

Elementwise: an element of an output hangs on the elements at its place in arrays of one
shape, on scalars, and on the scale of its block.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from optax_mp.leafwise._blocks import blocks_in, is_block_operation
from optax_mp.leafwise._program import Node, Program, Value, values_in

ELEMENTWISE = frozenset(
    """add sub mul div rem max min neg sign abs sqrt rsqrt cbrt exp exp2 log log1p
    expm1 tanh logistic pow integer_pow square select_n clamp convert_element_type eq ne
    lt le gt ge and or not xor is_finite floor ceil round stop_gradient copy shift_left
    shift_right_logical shift_right_arithmetic bitcast_convert_type reduce_precision
    nextafter pvary pcast""".split()
)
_SMALLEST_SIZE = 4096


@dataclass(frozen=True)
class End:
    """The elementwise end of a step for one leaf, or for several that meet in it.

    Attributes:
        places: its equations in the program.
        reads: what it reads: inputs of the step, or values computed before.
        outputs: which outputs of the step it computes.
        replaced: for each of these that takes the place of an input, by its place in
            `outputs`, which of `reads` that is.
        shape: of its elements.
        block_size: how many elements along the last axis share a scale, if any do.
    """

    places: list[int]
    reads: list[Value]
    outputs: list[int]
    replaced: dict[int, int]
    shape: tuple[int, ...]
    block_size: int | None


def cut(program: Program, replaced: dict[int, int]) -> list[End]:
    """Return the ends of a program that are worth a kernel.

    Args:
        program: the program.
        replaced: which input an output takes the place of.
    """
    groups: list[tuple[set[int], set[int], set[Value]]] = []
    for i, value in enumerate(program.outputs):
        if not isinstance(value, Value) or value.made_at is None:
            continue
        if not value.aval.ndim or not _fits(program.nodes[value.made_at]):
            continue
        places, reads = _suffix(program, value)
        touched = {r for r in reads if r.aval.ndim}
        # What shares an equation on arrays, or an array, is one end. Arrays that are
        # made of scalars are not shared: each end makes its own.
        shared = {place for place in places if _reads_arrays(program.nodes[place])}
        new = ({i}, shared, touched)
        rest = []
        for group in groups:
            if group[1] & new[1] or group[2] & new[2]:
                new = tuple(a | b for a, b in zip(group, new, strict=True))
            else:
                rest.append(group)
        groups = [*rest, new]
    ends = [_end(program, replaced, outputs) for outputs, _, _ in groups]
    return [end for end in ends if end is not None]


def _reads_arrays(node: Node) -> bool:
    return any(value.aval.ndim for value in values_in(node.inputs))


def _end(program: Program, replaced: dict[int, int], outputs: set[int]) -> End | None:
    """Return the end with these outputs, or None if a kernel would not pay."""
    suffixes = [_suffix(program, program.outputs[i]) for i in outputs]
    places = {place for suffix, _ in suffixes for place in suffix}
    nodes = [program.nodes[place] for place in places]
    found = [blocks_in(n.equation) for n in nodes if is_block_operation(n.equation)]
    blocks = {(each.axis, each.size) for each in found}
    avals = [program.outputs[i].aval for i in outputs]
    shape = max((aval.shape for aval in avals), key=math.prod)
    # Floats and their sums, XLA puts into one kernel itself, but not what is packed.
    is_packed = any(jnp.issubdtype(aval.dtype, jnp.integer) for aval in avals)
    if not is_packed or math.prod(shape) < _SMALLEST_SIZE or len(blocks) > 1:
        return None
    axis, block_size = blocks.pop() if blocks else (len(shape) - 1, None)
    if axis != len(shape) - 1:
        return None
    made = {value for node in nodes for value in node.outputs}
    reads = list(
        dict.fromkeys(
            value
            for place in sorted(places)
            for value in values_in(program.nodes[place].inputs)
            if value not in made
        )
    )
    place_of = {value: i for i, value in enumerate(reads)}
    ordered = sorted(outputs)
    return End(
        places=sorted(places),
        reads=reads,
        outputs=ordered,
        replaced={
            at: place_of[program.inputs[replaced[i]]]
            for at, i in enumerate(ordered)
            if i in replaced and program.inputs[replaced[i]] in place_of
        },
        shape=shape,
        block_size=block_size,
    )


def _suffix(program: Program, output: Value) -> tuple[set[int], set[Value]]:
    """Return the equations of an output's elementwise end, and what these read."""
    places: set[int] = set()
    reads: set[Value] = set()
    stack = [output]
    seen = {output}
    while stack:
        value = stack.pop()
        at = value.made_at
        if at is not None and value.aval.ndim and _fits(program.nodes[at]):
            places.add(at)
            for other in values_in(program.nodes[at].inputs):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        else:
            reads.add(value)
    return places, reads


def _fits(node: Node) -> bool:
    """Return whether an equation is elementwise."""
    equation = node.equation
    name = equation.primitive.name
    if is_block_operation(equation) or name == "iota":
        return True
    if name == "broadcast_in_dim":
        return not equation.invars[0].aval.shape
    if name not in ELEMENTWISE or len(equation.outvars) != 1:
        return False
    shape = equation.outvars[0].aval.shape
    if name == "bitcast_convert_type":
        return equation.invars[0].aval.shape == shape
    return all(a.aval.shape in ((), shape) for a in equation.invars)
