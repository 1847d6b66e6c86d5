"""Which parts of a program are the same computation, on other arrays.

Leaves of one shape mostly have the same computation. It is traced and lowered once.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from optax_mp.leafwise._program import Node, Value


def form_of(
    nodes: Sequence[Node], reads: Sequence[Value], outputs: Sequence[Any]
) -> Hashable:
    """Return a key for what equations compute: equal if they only read other values."""
    # They are alike if they are the same, in the same order, on values of the same
    # types with the same numbers. Names of variables do not matter, nor where a value
    # was made.
    number = {value: i for i, value in enumerate(reads)}

    def named(x: Any) -> Hashable:
        return number[x] if isinstance(x, Value) else _literal(x)

    form: list[Hashable] = [value.aval for value in reads]
    for node in nodes:
        inputs = tuple(map(named, node.inputs))
        for value in node.outputs:
            number[value] = len(number)
        avals = tuple(value.aval for value in node.outputs)
        form.append((node.equation.primitive, _params(node.equation), inputs, avals))
    return *form, *map(named, outputs)


def _params(equation: Any) -> Hashable:
    return tuple((name, _comparable(x)) for name, x in equation.params.items())


def _comparable(param: Any) -> Hashable:
    try:
        hash(param)
    except TypeError:
        return object()  # equal to nothing else
    return param


def _literal(literal: Any) -> Hashable:
    # 0.0 equals -0.0, and NaN not even itself.
    return literal.aval, np.asarray(literal.val).tobytes()
