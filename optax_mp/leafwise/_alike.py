"""Which ends of a step are the same computation, on other arrays.

Those of leaves of one shape mostly are. They are traced and lowered once.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from optax_mp.leafwise._blocks import is_block_operation
from optax_mp.leafwise._cut import End
from optax_mp.leafwise._program import Program, Value


def form_of(program: Program, end: End) -> Hashable:
    """Return what an end computes: equal for ends that differ in what they read alone.

    Values are numbered in order.
    """
    number = {value: i for i, value in enumerate(end.reads)}
    form: list[Hashable] = [end.shape, *(value.aval for value in end.reads)]
    for place in end.places:
        node = program.nodes[place]
        inputs = tuple(
            number[x] if isinstance(x, Value) else _literal(x) for x in node.inputs
        )
        for value in node.outputs:
            number[value] = len(number)
        avals = tuple(value.aval for value in node.outputs)
        form.append((node.equation.primitive, _params(node.equation), inputs, avals))
    outputs = [program.outputs[i] for i in end.outputs]
    form += [*(number[value] for value in outputs), *end.replaced.items()]
    return tuple(form)


def _params(equation: Any) -> Hashable:
    if is_block_operation(equation):  # the jaxpr of each is another object
        return equation.params["name"]
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
