"""What a compiled program sends between devices, and in which dtype it sums.

XLA chooses both under `jit`, and has no API that says so: this reads the text of the
compiled program, as the compilers for CPUs, GPUs and TPUs write it. All devices take
part in each exchange.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

# An array of a program: its dtype, and how many numbers it has.
Array = tuple[str, int]

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.M | re.S)
_COLLECTIVE = re.compile(
    r"%?([\w.-]+) = ([^=]*?) (all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute)(-start)?\((.*)"
)
_DEFINITION = re.compile(r"^ +(?:ROOT )?%?([\w.-]+) = .*", re.M)
_NAME = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]+\w*)\[([0-9,]+)\]")
_ADDITION = re.compile(r"= (b?f\d+)\[[^=]*? (?:add|reduce)\(")
_CALLED = re.compile(r"(?:calls|body|to_apply)=%?([\w.-]+)")
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_CONSTANT = re.compile(r" constant\((\d+)\)")
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
# After these a gradient is still the same.
_MOVED = re.compile(
    r" (?:all-to-all|collective-permute|get-tuple-element|bitcast|bitcast-convert"
    r"|convert|copy|reshape|transpose|concatenate|tuple|fusion)(?:-start|-done)?\("
)
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "u16": "uint16"}


class Exchange(NamedTuple):
    """Collectives of one kind that carry one param, or its gradient.

    Attributes:
        kind: as XLA calls it, such as `"all-reduce"`.
        param: the name of the param, or `""`. It is found by its size: if several have
            it, this is the first of them, and how many more.
        dtype: what is sent.
        sum_dtype: the dtype of the sum, or None if nothing is added up.
        times: how often it is sent in one step.
        bytes: how many a device sends to others for that, in a ring.
    """

    kind: str
    param: str
    dtype: str
    sum_dtype: str | None
    times: int
    bytes: int


def exchanges(program: str, sizes: dict[str, int], device_count: int) -> list[Exchange]:
    """Return what a step sends, the largest first.

    Args:
        program: the text of the compiled step.
        sizes: how many numbers each param has, by its name.
        device_count: how many devices the program is for.
    """
    times, all_bytes = Counter(), Counter()
    for kind, arrays, sum_dtype, runs in _Program(program).collectives(device_count):
        share = 1 - 1 / device_count
        share = {"all-reduce": 2 * share, "collective-permute": 1}.get(kind, share)
        # A TPU sends a param in a ring, from device to device in parts.
        parts = device_count if kind == "collective-permute" else 1
        for dtype, size in arrays:
            named = [name for name, each in sizes.items() if each == size * parts]
            more = f" or {len(named) - 1} more" if named[1:] else ""
            key = (kind, named[0] + more if named else "", dtype, sum_dtype)
            times[key] += runs
            all_bytes[key] += round(runs * share * size * _bits_of(dtype) / 8)
    rows: list[Any] = [(*key, times[key], n) for key, n in all_bytes.most_common()]
    return [Exchange(*row) for row in rows]


class _Program:
    """The text of a compiled program, by computations and by lines."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", "", text)
        self.bodies = dict(_COMPUTATION.findall(text))
        self.line_of = {x[1]: x[0] for x in _DEFINITION.finditer(text)}
        self.callers: Any = defaultdict(list)
        for name, body in self.bodies.items():
            for line in body.splitlines():
                loop = _CONDITION.search(line)
                condition = self.inside(self.bodies[loop[1]]) if loop else ""
                times = max(map(int, _CONSTANT.findall(condition)), default=1)
                for called in _CALLED.findall(line):
                    self.callers[called].append((name, times))

    def inside(self, text: str) -> str:
        """Return a part of the program with all that it calls."""
        called = (self.bodies.get(name, "") for name in _CALLED.findall(text))
        return text + "".join(map(self.inside, called))

    def runs(self, name: str) -> int:
        """Return how often a computation runs in one step."""
        return sum(self.runs(caller) * n for caller, n in self.callers[name]) or 1

    def collectives(
        self, device_count: int
    ) -> Iterator[tuple[str, list[Array], str | None, int]]:
        """Yield kind, arrays, dtype of sums, and runs of each."""
        pieces: set[Any] = set()
        for name, body in self.bodies.items():
            lines = body.splitlines()
            for i, match in enumerate(map(_COLLECTIVE.search, lines)):
                if match is None or not (arrays := _arrays_in(match[2])):
                    continue  # nothing but scalars
                value, _, kind, start, rest = match.groups()
                # A TPU computes beside some, and has them in several pieces.
                chain = _CHAIN.findall(rest)
                if (piece := (*chain, *arrays)) in pieces:
                    continue
                pieces |= {piece} if chain else set()
                if kind == "all-reduce":
                    arrays = self._apart(arrays, rest)
                elif start:
                    arrays = arrays[len(arrays) // 2 :]  # after what it is given
                if kind == "all-to-all":
                    arrays = [(arrays[0][0], sum(n for _, n in arrays))]
                if kind == "reduce-scatter":
                    arrays = [(dtype, n * device_count) for dtype, n in arrays]
                if "all-reduce-scatter" in name:
                    kind = "reduce-scatter"  # of a TPU
                adds = None if "gather" in kind else self._sums(value, lines[i:])
                if adds and kind == "collective-permute":
                    adds = arrays[0][0]  # it sends what is added up so far
                yield kind, arrays, adds, self.runs(name)

    def _apart(self, arrays: list[Array], operands: str) -> list[Array]:
        """Return the arrays that a GPU has joined for one collective."""
        joined = self.line_of.get(_NAME.findall(operands)[0], "").partition("(")[2]
        lines = [self.line_of.get(x, "") for x in _NAME.findall(joined.split(")")[0])]
        parts = [x for line in lines for x in _arrays_in(line.split("(")[0])]
        return parts if sum(n for _, n in parts) == arrays[0][1] else arrays

    def _sums(self, value: str, lines: list[str]) -> str | None:
        """Return in which dtype a collective, or the first that reads it, adds."""
        values = {value}
        for line in lines:
            if values.isdisjoint(_NAME.findall(line)):
                continue
            if found := _ADDITION.search(self.inside(line)):
                return _DTYPES.get(found[1], found[1])
            if _MOVED.search(line):
                values |= set(_DEFINITION.findall(line))
        return None


def _arrays_in(text: str) -> list[Array]:
    """Return dtype and size of the arrays in a type."""
    found: list[tuple[str, str]] = _ARRAY.findall(text)
    return [
        (_DTYPES.get(dtype, dtype), math.prod(map(int, shape.split(","))))
        for dtype, shape in found
    ]


def _bits_of(dtype: str) -> int:
    return int(re.findall(r"\d+", dtype)[0])
