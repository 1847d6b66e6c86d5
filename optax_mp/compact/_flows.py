"""How the inputs of a jaxpr reach its outputs: decayed, as in an average, or rooted."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_mp.core.jax_api import _jaxpr
from optax_mp.jaxprs import _primitives
from optax_mp.jaxprs._control_flow import has_regions, wiring_of
from optax_mp.jaxprs._follow import follow

_NONE: frozenset[int] = frozenset()
# Of a negative number they are NaN.
_ROOTS = frozenset({"sqrt", "rsqrt", "pow"})


class Flow(NamedTuple):
    """Which inputs of a jaxpr one of its values is computed from, by their indices.

    Inputs that reach it only through a single number, such as the norm of all
    gradients, are left out.

    Attributes:
        reached_by: every input that the value depends on.
        decayed: those multiplied on the way by a constant smaller than 1, as the old
            value of a moving average is.
        multiplied: those that go through a matrix product.
        factored: those that go through a factorization or a solver.
        terms: the value is a sum of multiples of these variables, entry by entry.
        rooted: those that are terms of a value whose root is taken.
        subtracted: those that are subtracted from something which does not depend on
            them.
        differences: pairs of a term of a value whose root is taken, and another
            variable that is subtracted from it.
        shrinks: whether the value itself is a constant smaller than 1.
    """

    reached_by: frozenset[int] = _NONE
    decayed: frozenset[int] = _NONE
    multiplied: frozenset[int] = _NONE
    factored: frozenset[int] = _NONE
    terms: frozenset[int] = _NONE
    rooted: frozenset[int] = _NONE
    subtracted: frozenset[int] = _NONE
    differences: frozenset[tuple[int, int]] = frozenset()
    shrinks: bool = False


def flows(jaxpr: _jaxpr.AnyJaxpr, inputs: Sequence[Flow] = ()) -> list[Flow]:
    """Return how the inputs of `jaxpr` reach each of its outputs.

    Args:
        jaxpr: the jaxpr of any function.
        inputs: for each input of `jaxpr`, the inputs of an outer jaxpr that reach it;
            by default, only itself.
    """
    inputs = inputs or own_flows(jaxpr)

    def results(equation: _jaxpr.Equation, inputs: list[Flow]) -> list[Flow]:
        outputs = _results(equation, inputs)
        return list(map(_without_scalars, outputs, equation.outvars))

    return follow(jaxpr, inputs, results, _constant)


def own_flows(jaxpr: _jaxpr.AnyJaxpr, shrinking: Collection[int] = ()) -> list[Flow]:
    """Return the flows of the inputs of `jaxpr`, each of which is only itself.

    Args:
        jaxpr: the jaxpr.
        shrinking: the inputs that are known to be smaller than 1, by their indices.
    """
    variables = _jaxpr.open_jaxpr(jaxpr)[0].invars
    sets = (frozenset({i}) for i in range(len(variables)))
    return [
        _without_scalars(Flow(x, terms=x, shrinks=i in shrinking), variable)
        for i, (x, variable) in enumerate(zip(sets, variables, strict=True))
    ]


def _results(equation: Any, inputs: list[Flow]) -> list[Flow]:
    """Return the flow of each output of an equation, from its inputs'."""
    name, count = equation.primitive.name, len(equation.outvars)
    if has_regions(equation):
        # The index of a branch is a single number, which is left out.
        wiring = wiring_of(equation)
        through = wiring.forward(inputs, lambda x, y: flows(x.jaxpr, y), union_of)
        return through.outputs
    if name == "select_n":
        return [union_of(inputs[1:])]  # The first input only decides.
    if name in _primitives.MOVES:
        return inputs if name in _primitives.HANDS_ON else inputs[:1] * count
    union = union_of(inputs)
    if name in _primitives.JOINS:
        return [union]
    terms = _terms(name, inputs)
    subtracted = union.subtracted if terms else _NONE
    if name == "sub":
        subtracted |= inputs[1].reached_by - inputs[0].reached_by
    result = union._replace(terms=terms, subtracted=subtracted)
    if name in _ROOTS and not _is_integer(equation.invars[-1]):
        below = inputs[0]
        pairs = {(x, y) for x in below.terms for y in below.subtracted if x != y}
        return [
            result._replace(
                rooted=result.rooted | below.terms,
                differences=result.differences | pairs,
            )
        ]
    if _primitives.is_product(equation):
        return [result._replace(multiplied=union.reached_by)] * count
    if name in _primitives.FACTORIZATIONS:
        return [result._replace(factored=union.reached_by)] * count
    if name == "mul" and any(flow.shrinks for flow in inputs):
        return [result._replace(decayed=union.reached_by)]
    return [result] * count


def _terms(name: str, inputs: list[Flow]) -> frozenset[int]:
    """Return the inputs whose multiples an operation adds up to its result."""
    first = inputs[0].terms if inputs else _NONE
    match name:
        case "add" | "add_any" | "sub":
            return first | inputs[1].terms
        # A maximum with a constant says nothing of the sign of what is below it.
        case "max" | "min" if first and inputs[1].terms:
            return first | inputs[1].terms
        case "mul":  # a square is not negative, whatever is squared
            return first ^ inputs[1].terms
        case "div" | "neg":
            return first
    return _NONE


def _is_integer(atom: Any) -> bool:
    return _jaxpr.is_literal(atom) and _is_always(atom.val, lambda x: x % 1 == 0)


def union_of(each: Iterable[Flow]) -> Flow:
    """Return the flow of a value that is any of these, or is computed from all."""
    # All fields but `shrinks` are sets.
    fields = zip(*(flow[:-1] for flow in each), strict=True)
    unions: list[Any] = [_NONE.union(*sets) for sets in fields]
    return Flow(*unions)


def _without_scalars(flow: Flow, var: Any) -> Flow:
    """Return the flow of `var`, without its sources if it is a single number."""
    is_array = getattr(var.aval, "size", 0) > 1
    return flow if is_array else Flow(shrinks=flow.shrinks)


def _constant(value: Any) -> Flow:
    return Flow(shrinks=_is_always(value, lambda x: abs(x) < 1))


def _is_always(value: Any, test: Callable[[np.ndarray], Any]) -> bool:
    """Return whether all entries of a literal or a constant pass a test."""
    try:
        return bool(np.all(test(np.asarray(value))))
    except TypeError:  # no number, such as a random key, or a traced value
        return False
