"""Collectives in the text of a compiled program, which XLA writes and no API has."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_mp._jax._contact import tried

# Patterns of a program's text.
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
# One group of devices, in three spellings, or one pair of them.
_LIST = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")
_GRID = re.compile(r"replica_groups=\[(\d+),\d+\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "u16": "uint16"}


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

    def collectives(self) -> Iterator[tuple[str, list[Any], list[int], Any, int]]:
        """Yield kind, arrays, devices of a group, dtype of sums, and runs of each."""
        pieces: set[Any] = set()
        for name, body in self.bodies.items():
            lines = body.splitlines()
            for i, match in enumerate(map(_COLLECTIVE.search, lines)):
                if match is None or not (arrays := _arrays_in(match[2])):
                    continue  # nothing but scalars
                value, _, kind, start, rest = match.groups()
                devices = _devices_of(rest)
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
                    arrays = [(dtype, n * len(devices)) for dtype, n in arrays]
                if "all-reduce-scatter" in name:
                    kind = "reduce-scatter"  # of a TPU
                adds = None if "gather" in kind else self._sums(value, lines[i:])
                if adds and kind == "collective-permute":
                    adds = arrays[0][0]  # it sends what is added up so far
                yield kind, arrays, devices, adds, self.runs(name)

    def _apart(self, arrays: list[Any], operands: str) -> list[Any]:
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


def _arrays_in(text: str) -> list[tuple[str, int]]:
    """Return dtype and size of the arrays in a type."""
    found: list[tuple[str, str]] = _ARRAY.findall(text)
    return [(_DTYPES.get(x, x), math.prod(_numbers(shape))) for x, shape in found]


def _devices_of(text: str) -> list[int]:
    """Return the devices of one group of a collective."""
    if found := _LIST.search(text):
        return _numbers(found[1])
    if found := _GRID.search(text):
        count, sizes, order = (_numbers(x or "") for x in found.groups())
        grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(order or None)
        return grid.reshape(count[0], -1)[0].tolist()
    sizes, joined = found.groups() if (found := _AXES.search(text)) else ("", "")
    names = re.findall(r"'(\w+)'", sizes)
    index = tuple(slice(None) if f"'{x}'" in joined else 0 for x in names)
    sizes = _numbers(re.sub(r"'\w+'", "", sizes))
    return np.arange(math.prod(sizes)).reshape(sizes)[index].ravel().tolist()


def _numbers(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def bits_of(dtype: str) -> int:
    """Return the bits of a dtype, by the name that it has here."""
    return _numbers(dtype)[0]


def _about_a_sum(ask: Callable[[str], list[Any]]) -> bool:
    """Ask about a sum over two devices, or whether there is a program, on one."""
    devices = jax.local_devices()[:2]
    mesh = Mesh(np.array(devices), ("x",))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("x",), ()))
    x = jax.ShapeDtypeStruct((2, 512), jnp.float32, sharding=rows)
    program = jax.jit(lambda x: jnp.sum(x, 0), out_shardings=whole)
    text = program.lower(x).compile().as_text() or ""
    if len(devices) == 1:
        return bool(_Program(text).bodies)
    sums = [(arrays, adds) for _, arrays, _, adds, _ in ask(text)]
    return sums == [([("float32", 512)], "float32")]


@tried(_about_a_sum, [], "`collectives_report` finds nothing that is sent")
def collectives_in(text: str) -> list[tuple[str, list[Any], list[int], Any, int]]:
    """Return kind, arrays, devices of a group, dtype of sums, and runs of each."""
    return list(_Program(text).collectives())
