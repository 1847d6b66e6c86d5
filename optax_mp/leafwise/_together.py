"""Take the step of small leaves together on a CPU, where they do the same.

XLA for CPUs passes over each operation of each leaf dozens of times, and keeps what it
computes in between for all leaves at once. Leaves that are stacked into one array have
each operation once. A stack is computed apart from the others, so that the next one can
take its memory.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import bits
from optax_mp._jax._apart import apart, can_call_apart
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._program import Value

Run = Callable[..., list[Any]]
# What a stack of as many elements needs stays in a CPU's cache. With fewer leaves in it
# no step is faster; with more it takes longer to compile than several.
_MOST_ELEMENTS = 2**16
_FEWEST_LEAVES, _MOST_LEAVES = 8, 32
_NARROW = {8: jnp.uint8, 16: jnp.uint16}


@dataclass(frozen=True)
class Team:
    """Ends that compute the same of different arrays.

    Attributes:
        ends: the ends.
    """

    ends: Sequence[End]

    @classmethod
    def find(cls, ends: Sequence[End], form: Callable[[End], Hashable]) -> list["Team"]:
        """Return teams of ends, which may have one member.

        Args:
            ends: the ends.
            form: what an end computes.
        """
        if not can_call_apart():
            return [cls([end]) for end in ends]
        alike: dict[Any, list[End]] = {}
        for i, end in enumerate(ends):
            is_large = _FEWEST_LEAVES * prod(end.shape) > _MOST_ELEMENTS
            alike.setdefault(i if is_large else form(end), []).append(end)
        return [team for same in alike.values() for team in cls._split(same)]

    @classmethod
    def _split(cls, ends: list[End]) -> Iterator["Team"]:
        size = max(1, prod(ends[0].shape))
        most = min(_MOST_LEAVES, max(1, _MOST_ELEMENTS // size))
        length = ceil(len(ends) / ceil(len(ends) / most))
        for first in range(0, len(ends), length):
            yield cls(ends[first : first + length])

    @property
    def is_shared(self) -> tuple[bool, ...]:
        """Return for each value that an end reads whether all read the same one."""
        return tuple(len(set(column)) == 1 for column in self._columns)

    @property
    def reads(self) -> list[Value]:
        """Return what all of them read: for each place one value, or one for each."""
        both = zip(self._columns, self.is_shared, strict=True)
        return [x for column, same in both for x in (column[:1] if same else column)]

    @property
    def _columns(self) -> list[tuple[Value, ...]]:
        return list(zip(*(end.reads for end in self.ends), strict=True))


@dataclass(frozen=True)
class TeamRun:
    """Runs a team, or another that does the same.

    Attributes:
        run_one: runs one end, given what that reads.
        count: how many ends there are.
        is_shared: for each value that an end reads whether it is the same for all.
    """

    run_one: Run
    count: int
    is_shared: tuple[bool, ...]

    def separately(self, *args: Any) -> list[Any]:
        """Return the outputs of all ends, given what the team reads, one by one."""
        columns = self._columns(args)
        rows = [
            self.run_one(*(column[-1 if same else i] for column, same in columns))
            for i in range(self.count)
        ]
        return [x for row in rows for x in row]

    def stacked(self, *args: Any) -> list[Any]:
        """Return the same, computed for all ends at a time."""
        columns = self._columns(args)
        stacks = [column[0] if same else _stack(column) for column, same in columns]
        in_axes = [None if same else 0 for same in self.is_shared]
        # Apart, or XLA would compute all of it again for each part of the stack.
        run = jax.vmap(self.run_one, in_axes, axis_size=self.count)
        outputs = apart(run)(*stacks)
        rows = zip(*map(_unstack, outputs), strict=True)
        return [x for row in rows for x in row]

    def _columns(self, args: Sequence[Any]) -> list[tuple[Sequence[Any], bool]]:
        columns, start = [], 0
        for same in self.is_shared:
            stop = start + (1 if same else self.count)
            columns.append((args[start:stop], same))
            start = stop
        return columns


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    if not arrays[0].ndim:
        return jnp.stack(arrays)
    # XLA for CPUs would widen narrow floats to float32, and round them again.
    rows = lax.concatenate([_as_bits(x) for x in arrays], 0)
    shape, dtype = arrays[0].shape, arrays[0].dtype
    return _of_bits(rows.reshape(len(arrays), *shape), dtype)


def _unstack(stack: jax.Array) -> list[jax.Array]:
    if stack.ndim == 1:
        return list(stack)
    count, length, *rest = stack.shape
    rows = _as_bits(stack).reshape(count * length, *rest)
    parts = (rows[i * length : (i + 1) * length] for i in range(count))
    return [_of_bits(part, stack.dtype) for part in parts]


def _as_bits(x: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    dtype = _NARROW.get(bits(x.dtype)) if is_float else None
    return x if dtype is None else lax.bitcast_convert_type(x, dtype)


def _of_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
