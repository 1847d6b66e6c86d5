"""Take a step leaf by leaf: in one pass over each, where a platform has a kernel."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._jax._arrays import is_traced
from optax_mp._jax._by_platform import by_platform
from optax_mp._jax._traced import TracedCall, is_output
from optax_mp._tree import is_array
from optax_mp.leafwise import _gpu, _tpu
from optax_mp.leafwise._blocks import is_block_operation
from optax_mp.leafwise._cut import End, cut
from optax_mp.leafwise._program import Program, Value, read

_RUNNERS = {"tpu": _tpu, "cuda": _gpu}
# Whether a step is being traced: one within it is a part of that.
_is_running: ContextVar[bool] = ContextVar("_is_running", default=False)


def run_leafwise(
    step: Callable[[Any, Any], tuple[Any, Any]],
    given: Any,
    kept: Any,
    platforms: Sequence[str],
) -> tuple[Any, Any]:
    """Return `step(given, kept)`, with the elementwise end of each leaf in one piece.

    Args:
        step: returns what it makes, and what takes the place of `kept`.
        given: a pytree.
        kept: another. Its arrays can be overwritten, if they are donated.
        platforms: those for which kernels are made.
    """
    leaves = jax.tree.leaves((given, kept))
    if not any(map(is_traced, leaves)) or not any(map(_is_packed, leaves)):
        return step(given, kept)
    if _is_running.get():
        return step(given, kept)
    token = _is_running.set(True)
    try:
        traced = TracedCall.of(lambda both: step(*both), (given, kept))
    finally:
        _is_running.reset(token)
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
        args = [known[value] for value in end.reads]
        outputs = _run(program, end, args, platforms)
        results.update(zip(end.outputs, outputs, strict=True))
    for i, value in enumerate(program.outputs):
        if i not in at_ends:
            results[i] = read(known, value)
    return traced.unflatten([results[i] for i in range(len(program.outputs))])


def _is_packed(leaf: Any) -> bool:
    """Return whether an array holds codes, or the bits that a param lacks."""
    return (
        is_array(leaf)
        and jnp.issubdtype(leaf.dtype, jnp.integer)
        and leaf.dtype.itemsize < 4
    )


def _replaced(traced: TracedCall, kept: Any) -> dict[int, int]:
    """Return for each array of the result the one of the argument that it replaces."""
    _, new = jax.tree.unflatten(traced.treedef, traced.outputs)
    if jax.tree.structure(new) != jax.tree.structure(kept):
        return {}
    outputs = sum(map(is_output, traced.outputs))
    arrays, count = len(traced.arrays), sum(map(is_output, jax.tree.leaves(new)))
    return {outputs - i: arrays - i for i in range(1, count + 1)}


def _run(
    program: Program, end: End, args: Sequence[Any], platforms: Sequence[str]
) -> list[Any]:
    def anywhere(*args: Any) -> list[Any]:
        known: dict[Value, Any] = dict(zip(end.reads, args, strict=True))
        program.run(end.places, known)
        return [known[program.outputs[i]] for i in end.outputs]

    ways = {
        platform: lambda *args, run=runner.run_end: list(run(program, end, args))
        for platform, runner in _RUNNERS.items()
        if platform in platforms and runner.takes(program, end)
    }
    return by_platform(anywhere, ways, *args, what="optax_mp")
