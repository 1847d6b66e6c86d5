"""What a function keeps for its backward pass, and what reads it there.

python benchmarks eight_bits --only kept
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._jax._source import source_line

# They hand on what they are given; what reads their output reads the array.
_MOVES = (
    *("broadcast_in_dim", "convert_element_type", "reshape", "squeeze"),
    *("stop_gradient", "transpose"),
)
PRODUCT = "dot_general"


@dataclass(frozen=True)
class Kept:
    """An array that the forward pass keeps.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read_by: the primitives of the backward pass that read it.
        line: the line that the first of them comes from, such as `model.py:12`.
    """

    shape: tuple[int, ...]
    dtype: Any
    read_by: tuple[str, ...]
    line: str

    @property
    def mib(self) -> float:
        """Its size."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype).size * (
            self.dtype.itemsize / 2**20
        )


def kept_of(fun: Callable[[Any], jax.Array], params: Any) -> list[Kept]:
    """Return what `fun` keeps for the gradient of a scalar by `params`."""
    pullback = jax.eval_shape(lambda params: jax.vjp(fun, params)[1], params)
    arrays, treedef = jax.tree.flatten(pullback)

    def pull(arrays: Any, cotangent: Any) -> Any:
        return treedef.unflatten(arrays)(cotangent)

    jaxpr = jax.make_jaxpr(pull)(arrays, jnp.float32(1)).jaxpr
    readers = defaultdict(list)
    for variable, name, line in _reads(jaxpr, {x: x for x in jaxpr.invars}, ""):
        readers[variable].append((name, line))
    kept = []
    for variable, array in zip(jaxpr.invars, arrays, strict=False):
        read_by = tuple(sorted({name for name, _ in readers[variable]}))
        line = readers[variable][0][1] if read_by else ""
        kept.append(Kept(array.shape, array.dtype, read_by, line))
    return kept


def _reads(
    jaxpr: Any, origins: dict[Any, Any], line: str
) -> Iterator[tuple[Any, str, str]]:
    """Yield each origin that an equation reads, with its primitive and its line."""
    for equation in jaxpr.eqns:
        here = source_line(equation) or line
        read = [None if hasattr(x, "val") else origins.get(x) for x in equation.invars]
        inner = next(_jaxprs_within(equation.params.values()), None)
        name = equation.primitive.name
        if inner is not None:
            pairs = zip(inner.invars, read[-len(inner.invars) :], strict=True)
            within = {x: origin for x, origin in pairs if origin is not None}
            yield from _reads(inner, within, here)
        elif name in _MOVES:
            origins[equation.outvars[0]] = read[0]
        else:
            yield from ((each, name, here) for each in read if each is not None)


def _jaxprs_within(params: Iterable[Any]) -> Iterator[Any]:
    for param in params:
        for each in param if isinstance(param, tuple | list) else (param,):
            each = getattr(each, "jaxpr", each)  # closed or open
            if hasattr(each, "eqns"):
                yield each


def table(kept: dict[str, list[Kept]], written: Any, least_mib: float) -> list[Any]:
    """Return a row for all arrays of a shape that are read in one line.

    Args:
        kept: by the name of their column, arrays.
        written: the module that they come from, for the text of its lines.
        least_mib: what is smaller in all columns is summed up in the last row.
    """
    lines = inspect.getsource(written).splitlines()
    groups: dict[Any, Any] = defaultdict(lambda: defaultdict(list))
    for column, arrays in kept.items():
        for each in arrays:
            place = each.shape, each.read_by, each.line
            groups[place][column].append(each)
    rows, rest = [], dict.fromkeys(kept, 0.0)
    for (shape, read_by, line), columns in groups.items():
        sizes = {name: sum(each.mib for each in columns[name]) for name in kept}
        if max(sizes.values()) < least_mib:
            rest = {name: rest[name] + sizes[name] for name in kept}
            continue
        number = int(line.rpartition(":")[2] or 0)
        first = next(iter(columns.values()))
        dtypes = [columns[name][0].dtype.name for name in columns]
        rows.append(
            {
                "read in": f"`{lines[number - 1].strip()}`" if number else "nowhere",
                "by": ", ".join(read_by),
                "arrays": f"{len(first)} of {' x '.join(map(str, shape))}",
                "dtype": " and ".join(dict.fromkeys(dtypes)),
                **{f"{name}, MiB": size for name, size in sizes.items()},
            }
        )
    rows.sort(key=lambda row: -list(row.values())[-2])
    small = {f"{name}, MiB": size for name, size in rest.items()}
    return [
        *rows,
        {"read in": "smaller ones", "by": "", "arrays": "", "dtype": ""} | small,
    ]
