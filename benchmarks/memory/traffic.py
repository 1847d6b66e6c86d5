"""Bytes that a compiled program moves to and from main memory, and what it sends.

XLA's own count takes a loop's body once, and counts what stays in memory on the chip.
This one reads the compiled program: each instruction moves its operands and results
that lie in main memory, of an array that is sliced or updated in place that part, and a
loop's body moves its bytes once for each trip.
"""

import math
import re
from dataclasses import dataclass, field

# They move nothing themselves.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while after-all iota".split()
)
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)
_SHAPE = re.compile(r"\b(bf|[fsu]|pred)(\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclass
class Instruction:
    """A line of a compiled program.

    Attributes:
        name: of its result.
        type: of its result.
        operation: what it does.
        operands: the names of what it reads, in order.
        rest: the line from the operands on.
    """

    name: str
    type: str
    operation: str
    operands: list[str]
    rest: str

    @property
    def is_free(self) -> bool:
        """Whether it moves nothing, such as the end of what another one started."""
        return self.operation in _FREE or self.operation.endswith("-done")

    @property
    def results(self) -> str:
        """The type of what it makes; the start of most collectives also has inputs."""
        if not self.operation.endswith("-start") or "all-reduce" in self.operation:
            return self.type
        arrays = [whole[0] for whole in _SHAPE.finditer(self.type)]
        return " ".join(arrays[len(self.operands) :])

    def computation(self, role: str) -> str:
        """Return the name of a computation that it calls."""
        return re.findall(rf"\b{role}=%?([\w.-]+)", self.rest)[0]


@dataclass
class Computation:
    """One of a program's computations.

    Attributes:
        instructions: by name, in order.
    """

    instructions: dict[str, Instruction] = field(default_factory=dict)

    def users(self, name: str) -> list[Instruction]:
        """Return what reads a value, through changes of its layout or shape."""
        found = []
        for each in self.instructions.values():
            if name in each.operands:
                is_view = each.operation in ("bitcast", "copy", "fusion")
                found += self.users(each.name) if is_view else [each]
        return found


def bytes_moved(program: str) -> float:
    """Return the bytes that a compiled program moves, by its text."""
    computations, entry = _parsed(program)
    return _moved(computations, computations[entry])


def collectives(program: str) -> list[tuple[str, int]]:
    """Return the kind of each collective in a program's text, and its results' bytes.

    One that computing goes on beside is written in several pieces, on one channel.
    """
    found, seen = [], set()
    for computation in _parsed(program)[0].values():
        for each in computation.instructions.values():
            kind = each.operation.removesuffix("-start")
            channel = _CHANNEL.search(each.rest)
            if kind not in _COLLECTIVES or (channel and channel[1] in seen):
                continue
            seen.update(channel.groups() if channel else ())
            found.append((kind, bytes_of(each.results)))
    return found


def bytes_of(types: str, *, in_main_memory: bool = False) -> int:
    """Return the bytes of the arrays in a type of XLA, such as `(f32[2,3], s8[4])`.

    Args:
        types: the type.
        in_main_memory: whether to leave out those in other memories, as `S(1)` says.
    """
    return sum(
        math.prod(map(int, filter(None, shape.split(","))))
        * max(1, int(bits or 8) // 8)
        for _, bits, shape, layout in _SHAPE.findall(types)
        if not (in_main_memory and "S(" in layout)
    )


def _parsed(program: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a program, and the name of the first that runs."""
    computations: dict[str, Computation] = {}
    current, entry = Computation(), ""
    for line in program.splitlines():
        head = _HEAD.match(line)
        if head:
            current = computations[head[2]] = Computation()
            entry = head[2] if head[1] else entry
            continue
        found = _LINE.match(line)
        if found:
            name, kind, operation, rest = found.groups()
            operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
            each = Instruction(name, kind, operation, operands, rest)
            current.instructions[name] = each
    return computations, entry


def _moved(computations: dict[str, Computation], here: Computation) -> float:
    total = 0.0
    for each in here.instructions.values():
        if each.operation == "while":
            body = computations[each.computation("body")]
            total += _trips(computations, each) * _moved(computations, body)
        elif not each.is_free:
            total += _moved_by(computations, here, each)
    return total


def _trips(computations: dict[str, Computation], loop: Instruction) -> int:
    """Return how often a loop from 0 runs, by the bound that it compares with.

    XLA says it for GPUs, whose conditions are fusions.
    """
    if said := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(said[1])
    condition = computations[loop.computation("condition")]
    constants = [
        int(each.rest.split(")")[0])
        for each in condition.instructions.values()
        if each.operation == "constant"
    ]
    if not constants:  # `offload` has loops of one round, whose bound XLA does not know
        return 1
    (bound,) = constants
    return bound


def _moved_by(
    computations: dict[str, Computation], here: Computation, each: Instruction
) -> float:
    """Return the bytes that one instruction reads and writes."""
    if each.operation.startswith(_COLLECTIVES):
        types = [here.instructions[x].type for x in each.operands]
        return bytes_of(" ".join([*types, each.results]), in_main_memory=True)
    if each.operation.endswith("-start"):  # (what it reads, what it makes, ...)
        # Of a copy between two memories, or from the host: one of them is main memory.
        _, bits, shape, _ = _SHAPE.findall(each.type)[:2][-1]  # or what it makes
        return bytes_of(f"u{bits}[{shape}]")
    is_fusion = each.operation == "fusion"
    inside = computations[each.computation("calls")] if is_fusion else here
    total = 0.0
    written = [
        bytes_of(whole[0], in_main_memory=True) for whole in _SHAPE.finditer(each.type)
    ]
    updated = set()
    for i, operand in enumerate(each.operands):
        kind = here.instructions[operand].type
        users = inside.users(_parameter(inside, i)) if is_fusion else [each]
        slices = [u for u in users if u.operation in ("dynamic-slice", "slice")]
        updates = [u for u in users if u.operation == "dynamic-update-slice"]
        if "S(" in kind or "[]" in kind:  # or the place of a slice
            continue
        if users and len(slices) + len(updates) == len(users):
            total += sum(bytes_of(u.type) for u in slices)
            updated |= {u.name for u in updates}
        else:
            total += bytes_of(kind)
    for name in updated:
        update = inside.instructions[name]
        part = inside.instructions[update.operands[1]]
        if bytes_of(update.type) in written:
            written[written.index(bytes_of(update.type))] = bytes_of(part.type)
    return total + sum(written)


def _parameter(inside: Computation, i: int) -> str:
    """Return what a fusion calls its operand within."""
    return next(
        x.name
        for x in inside.instructions.values()
        if x.operation == "parameter" and x.rest.startswith(f"{i})")
    )
