"""Take a step leaf by leaf: in one pass over each, where a platform has a kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_mp._jax._by_platform import by_platform
from optax_mp._jax._traced import TracedCall
from optax_mp.leafwise import _gpu, _tpu
from optax_mp.leafwise._blocks import is_block_operation
from optax_mp.leafwise._cut import End, cut
from optax_mp.leafwise._program import Program, Value, read


def run_leafwise(
    function: Callable[[Any], Any], argument: Any, replaced: dict[int, int]
) -> Any:
    """Return `function(argument)`, with the elementwise end of each leaf in one piece.

    Args:
        function: from a pytree to a pytree.
        argument: the pytree.
        replaced: which array of the argument an array of the result takes the place of.
    """
    traced = TracedCall.of(function, argument)
    program = Program.of(traced.closed, is_block_operation)
    ends = cut(program, replaced)
    at_ends = {i for end in ends for i in end.outputs}
    results: dict[int, Any] = {}
    others = [v for i, v in enumerate(program.outputs) if i not in at_ends]
    known: dict[Value, Any] = dict(zip(program.inputs, traced.arrays, strict=True))
    reads = [value for end in ends for value in end.reads]
    program.run(program.needed([*others, *reads]), known)
    for end in ends:
        outputs = _run(program, end, [known[value] for value in end.reads])
        results.update(zip(end.outputs, outputs, strict=True))
    for i, value in enumerate(program.outputs):
        if i not in at_ends:
            results[i] = read(known, value)
    return traced.unflatten([results[i] for i in range(len(program.outputs))])


def _run(program: Program, end: End, args: Sequence[Any]) -> list[Any]:
    def anywhere(*args: Any) -> list[Any]:
        known = dict(zip(end.reads, args, strict=True))
        program.run(end.places, known)
        return [known[program.outputs[i]] for i in end.outputs]

    runners = {"tpu": _tpu, "cuda": _gpu}
    ways = {
        platform: lambda *args, run=runner.run_end: list(run(program, end, args))
        for platform, runner in runners.items()
        if runner.takes(program, end)
    }
    return by_platform(anywhere, ways, *args, what="optax_mp")
