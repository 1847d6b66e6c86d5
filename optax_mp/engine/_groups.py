"""Compute the outputs of a traced function a few at a time, in one program for each."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from optax_mp._jax._jaxpr import TracedCall
from optax_mp.engine._program import (
    Program,
    Value,
    backward_slice,
    read_output,
    reads_of,
    run_nodes,
    structural_key,
    values_in,
)


def compute_in_groups(
    traced: TracedCall,
    groups: Iterable[Sequence[int]],
    place: Callable[[Any], Any],
) -> Any:
    """Return what a traced function returned, computed group by group.

    Args:
        traced: the function.
        groups: the indices of its outputs, each in one group.
        place: moves the list of a group's arrays to where they belong, in its program.
    """
    program = Program.of(traced.closed)
    known: dict[Value, Any] = dict(zip(program.inputs, traced.arrays, strict=True))
    known.update(program.constants)
    values: dict[int, Any] = {}
    compiled: dict[Hashable, Any] = {}
    for group in groups:
        outputs = [program.outputs[i] for i in group]
        made = _compute(program, outputs, known, compiled, place)
        values.update(zip(group, made, strict=True))
    return traced.unflatten([values[i] for i in range(len(values))])


def _compute(
    program: Program, outputs: Sequence[Any], known: Any, compiled: Any, place: Any
) -> list[Any]:
    """Return some outputs of a program. Equal computations are compiled once.

    Args:
        program: the program.
        outputs: values, or literals.
        known: its inputs and constants.
        compiled: what has been compiled so far, by what it computes.
        place: see `compute_in_groups`.
    """
    nodes = backward_slice(outputs)
    given = [value for value in values_in(outputs) if value.producer is None]
    reads = list(dict.fromkeys([*reads_of(nodes), *given]))
    if not any(value in program.inputs for value in reads):
        reads += program.inputs  # so that results are on the devices of the params

    def run(args: Sequence[Any]) -> list[Any]:
        local = dict(zip(reads, args, strict=True))
        run_nodes(nodes, local)
        return place([read_output(local, value) for value in outputs])

    key = structural_key(nodes, reads, outputs)
    if key not in compiled:
        compiled[key] = jax.jit(run, keep_unused=True)
    return compiled[key]([known[value] for value in reads])
