"""What in a step is made of arrays in host memory, and when it can be computed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from optax_mp._jax._memory import is_host_type
from optax_mp.leafwise._program import Program, Value, values_in


@dataclass
class HostFlow:
    """What in a program is made of arrays in host memory.

    Attributes:
        program: the program.
        min_size: arrays of fewer elements can stay on the device.
        sources: for each value that is made of such arrays, which.
        turn: for each value how many times before it something large is reduced to
            something small, such as a norm.
    """

    program: Program
    min_size: int
    sources: dict[Value, frozenset[Value]] = field(default_factory=dict)
    turn: dict[Value, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, min_size: int) -> "HostFlow":
        """Follow the arrays in host memory through a program."""
        flow = cls(program, min_size)
        for value in program.inputs:
            if is_host_type(value.aval):
                flow.sources[value] = frozenset([value])
        for node in program.nodes:
            inputs = list(values_in(node.inputs))
            sources = flow.sources_of(inputs)
            turn = max((flow.turn.get(v, 0) for v in inputs), default=0)
            is_brought = any(map(flow.is_brought, inputs))
            for value in node.outputs:
                if sources:
                    flow.sources[value] = sources
                is_reduced = is_brought and flow.is_small(value)
                flow.turn[value] = turn + is_reduced
        return flow

    def sources_of(self, values: Iterable[Value]) -> frozenset[Value]:
        """Return the arrays in host memory that some values are made of."""
        return frozenset().union(*(self.sources.get(value, ()) for value in values))

    def is_small(self, value: Value) -> bool:
        """Return whether a value can stay on the device."""
        return value.aval.size < self.min_size

    def is_brought(self, value: Value) -> bool:
        """Return whether a value is on the device only for a time."""
        return value in self.sources and not self.is_small(value)

    def inputs_of(self, value: Value) -> list[Value]:
        """Return what the equation reads that makes a value."""
        if value.made_at is None:
            return []
        return list(values_in(self.program.nodes[value.made_at].inputs))

    def is_reduced(self, value: Value) -> bool:
        """Return whether a small value is computed from what is brought."""
        return self.is_small(value) and any(map(self.is_brought, self.inputs_of(value)))

    def cone(
        self, targets: Iterable[Value], arrays: Iterable[Value] = ()
    ) -> tuple[list[int], list[Value]]:
        """Return the equations to compute some values, and the small values they need.

        Args:
            targets: the values.
            arrays: which arrays are brought as a whole for this. What hangs on others,
                too, must be known before, and so must what hangs on none and is small.
        """
        own, places = frozenset(arrays), set[int]()
        needed: dict[Value, None] = {}
        stack = list(targets)
        seen = set(stack)
        while stack:
            target = stack.pop()
            if target.made_at is None:
                continue
            places.add(target.made_at)
            for value in self.inputs_of(target):
                sources = self.sources.get(value, frozenset())
                if self.is_small(value) and not (sources and sources <= own):
                    needed[value] = None
                elif value not in seen:
                    seen.add(value)
                    stack.append(value)
        return sorted(places), list(needed)

    def arrays_read(self, places: Iterable[int]) -> list[Value]:
        """Return the arrays in host memory that some equations read."""
        read = self.program.reads_of(list(places))
        return [v for v in read if v.made_at is None and v in self.sources]

    def schedule(self, targets: Iterable[Value]) -> list["Turn"]:
        """Return what to compute, one turn after the other, for values to be known.

        Args:
            targets: values that are not brought.
        """
        turns: dict[int, Turn] = {}
        stack = list(targets)
        seen = set(stack)
        while stack:
            value = stack.pop()
            at = value.made_at
            if at is None:
                continue
            turn = turns.setdefault(self.turn[value], Turn())
            if self.is_reduced(value):
                turn.reduced.append(value)
                needed: Sequence[Value] = self.cone([value])[1]
            else:
                turn.places.add(at)
                needed = self.inputs_of(value)
            stack += [each for each in needed if each not in seen]
            seen.update(needed)
        return [turns[number] for number in sorted(turns)]


@dataclass
class Turn:
    """What can be computed as soon as the turns before it are done.

    Attributes:
        reduced: values that are computed from what is brought.
        places: the equations of others.
    """

    reduced: list[Value] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
