"""Take the step of large leaves in turn on a CPU, in the memory of a few.

XLA for CPUs begins with all leaves at a time. So it would keep what it computes in
between for all of them, and copy codes because it overwrites them before their last
use. New memory costs a CPU more than computing on it.
"""

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import jax

from optax_mp._jax._order import after, done_with
from optax_mp.leafwise._ends import End, is_packed
from optax_mp.leafwise._program import Program

# Leaves of at most this many elements are not worth it.
_SMALL = 2**13
# How many elements may be under way. What a part of them needs stays in a CPU's cache,
# and they keep its cores busy.
_MOST_ELEMENTS = 2**18


class Turns:
    """Runs ends, so that each waits for those long before.

    Args:
        program: the step that they are of.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._begun = 0
        # How many elements were begun before an end, and what tells that it is done.
        self._ends: list[tuple[int, jax.Array]] = []

    def run(
        self, end: End, run: Callable[..., list[Any]], args: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of an end.

        Args:
            end: the end.
            run: runs it.
            args: what it reads.
        """
        size = prod(end.shape)
        # For outputs that are codes, the old codes among what the end reads.
        codes = {i: k for i, k in end.replaced.items() if is_packed(end.reads[k].aval)}
        telling = self._telling_output(end, codes.values()) if size > _SMALL else None
        if telling is None:
            return run(args)
        args = list(args)
        for begun, done in reversed(self._ends):
            if self._begun - begun >= _MOST_ELEMENTS:
                _wait(done, args, codes.values())
                break
        outputs = run(args)
        done = done_with(outputs[telling])
        # Codes are overwritten when those before them were read for the last time.
        _wait(done, outputs, codes.keys() - {telling})
        self._ends.append((self._begun, done))
        self._begun += size
        return outputs

    def _telling_output(self, end: End, codes: Collection[int]) -> int | None:
        """Return an output that is computed from all codes, and written in place.

        When it is done, they have been read. An array that is not written in place
        might not be written at all, but be computed where it is read.
        """
        for i in end.replaced if codes else ():
            output = self._program.outputs[end.outputs[i]]
            places = self._program.needed([output], among=set(end.places))
            reads = self._program.reads_of(places)
            is_whole = output.aval.shape == end.shape
            if is_whole and {end.reads[k] for k in codes} <= set(reads):
                return i
        return None


def _wait(done: jax.Array, arrays: list[Any], places: Collection[int]) -> None:
    """Let some of the arrays wait."""
    waiting = after(done, [arrays[i] for i in places])
    for i, x in zip(places, waiting, strict=True):
        arrays[i] = x
