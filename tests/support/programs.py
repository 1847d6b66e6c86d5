"""What a traced function does, equation by equation."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """An equation, with the scopes of those that it is inside of."""

    name: str
    scopes: str
    equation: Any

    @property
    def inputs(self) -> list[Any]:
        return [_dtype(atom) for atom in self.equation.invars]

    @property
    def outputs(self) -> list[Any]:
        return [_dtype(atom) for atom in self.equation.outvars]


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)


def operations(jaxpr: Any, scopes: str = "") -> Iterator[Operation]:
    """Yield every equation, in inner jaxprs as well, but not in kernels."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inside = f"{scopes}/{equation.source_info.name_stack}"
        yield Operation(equation.primitive.name, inside, equation)
        if equation.primitive.name == "pallas_call":
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from operations(inner, inside)
