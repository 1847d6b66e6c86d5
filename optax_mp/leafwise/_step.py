"""Take a step leaf by leaf: in one pass over each, where a platform has a kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_mp._jax._by_platform import by_platform
from optax_mp._jax._traced import TracedCall, is_output
from optax_mp.leafwise import _gpu, _tpu
from optax_mp.leafwise._blocks import is_block_operation
from optax_mp.leafwise._cut import End, cut
from optax_mp.leafwise._program import Program, Value, read


def run_leafwise(step: Callable[[Any, Any], Any], given: Any, kept: Any) -> Any:
    """Return `step(given, kept)`, with the elementwise end of each leaf in one piece.

    Args:
        step: returns what takes the place of `kept`.
        given: a pytree.
        kept: another. Its arrays can be overwritten, if they are donated.
    """
    traced = TracedCall.of(lambda both: step(*both), (given, kept))
    program = Program.of(traced.closed, is_block_operation)
    ends = cut(program, _replaced(traced, kept))
    at_ends = {i for end in ends for i in end.outputs}
    others = [v for i, v in enumerate(program.outputs) if i not in at_ends]
    known: dict[Value, Any] = dict(zip(program.inputs, traced.arrays, strict=True))
    known.update(program.constants)
    reads = [value for end in ends for value in end.reads]
    program.run(program.needed([*others, *reads]), known)
    results: dict[int, Any] = {}
    for end in ends:
        outputs = _run(program, end, [known[value] for value in end.reads])
        results.update(zip(end.outputs, outputs, strict=True))
    for i, value in enumerate(program.outputs):
        if i not in at_ends:
            results[i] = read(known, value)
    return traced.unflatten([results[i] for i in range(len(program.outputs))])


def _replaced(traced: TracedCall, kept: Any) -> dict[int, int]:
    """Return for each array of the result the one of the argument that it replaces."""
    if jax.tree.structure(kept) != traced.treedef:
        return {}
    count, arrays = sum(map(is_output, traced.outputs)), len(traced.arrays)
    return {i: arrays - count + i for i in range(count)}


def _run(program: Program, end: End, args: Sequence[Any]) -> list[Any]:
    def anywhere(*args: Any) -> list[Any]:
        known: dict[Value, Any] = dict(zip(end.reads, args, strict=True))
        program.run(end.places, known)
        return [known[program.outputs[i]] for i in end.outputs]

    runners = {"tpu": _tpu, "cuda": _gpu}
    ways = {
        platform: lambda *args, run=runner.run_end: list(run(program, end, args))
        for platform, runner in runners.items()
        if runner.takes(program, end)
    }
    return by_platform(anywhere, ways, *args, what="optax_mp")
