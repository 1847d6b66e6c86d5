"""How the inputs of a jaxpr reach its outputs, array by array.

`depending_outputs` says that an output depends on an input. A `Flow` says how: whether
the input fades on the way, as in an average, and whether a root is taken of it.
An `Origin` says which groups of inputs a value is computed from, and what joined them.
`derivative_calls` says how often functions with a derivative rule get an input.
`asked_shardings` returns the shardings that a function asks for its outputs.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from optax_mp._jax._control_flow import PLAIN_CALLS, has_regions, run_count, wiring_of
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    is_always,
    is_literal,
    live_equations,
    open_jaxpr,
)
from optax_mp._jax._primitives import FACTORIZATIONS, HANDS_ON, JOINS, MOVES, is_product
from optax_mp._jax._source import function_of

T = TypeVar("T")


def follow(
    jaxpr: AnyJaxpr,
    inputs: Sequence[T],
    results: Callable[[Equation, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[T]:
    """Return facts of the outputs of a jaxpr, from facts of its inputs.

    Args:
        jaxpr: the jaxpr.
        inputs: the fact of each input.
        results: returns the facts of the outputs of an equation, from its
            inputs'.
        constant: returns the fact of a literal or a constant, from its value.
    """
    jaxpr, consts = open_jaxpr(jaxpr)
    facts = dict(zip(jaxpr.invars, inputs, strict=True))
    facts.update(zip(jaxpr.constvars, map(constant, consts), strict=True))

    def read(atom: Any) -> T:
        return constant(atom.val) if is_literal(atom) else facts[atom]

    for equation in jaxpr.eqns:
        outputs = results(equation, list(map(read, equation.invars)))
        facts.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def depending_outputs(jaxpr: AnyJaxpr, inputs: Sequence[bool] = ()) -> list[bool]:
    """Return which outputs of `jaxpr` depend on its inputs.

    An output depends on the values it is computed from, also on the index of a branch
    and the condition of a loop.

    Args:
        jaxpr: the jaxpr.
        inputs: for each input, whether to follow it; by default, all.
    """
    followed = inputs or [True] * len(open_jaxpr(jaxpr)[0].invars)
    own = [Origin(frozenset({0}) if x else _NONE) for x in followed]
    return [bool(x.groups) for x in origins(jaxpr, own)]


_NONE: frozenset[int] = frozenset()


class Origin(NamedTuple):
    """Which groups of inputs a value is computed from.

    Attributes:
        groups: their numbers.
        joined_in: where values of several groups first met; `""` if they did not.
    """

    groups: frozenset[int] = _NONE
    joined_in: str = ""

    @staticmethod
    def join(values: Sequence["Origin"], equation: Any = None) -> "Origin":
        """Return the origin of what an equation, or none, makes of several values."""
        groups = _NONE.union(*(x.groups for x in values))
        joined_in = next((x.joined_in for x in values if x.joined_in), "")
        most = max((len(x.groups) for x in values), default=0)
        if equation and not joined_in and len(groups) > most:
            joined_in = function_of(equation)
        return Origin(groups, joined_in)


def origins(
    jaxpr: AnyJaxpr, inputs: Sequence[Origin], known: Collection[str] = ()
) -> list[Origin]:
    """Return the origins of the outputs of `jaxpr`, given its inputs' origins.

    Results of primitives with a name in `known` count as constants.
    """

    def results(equation: Equation, inputs: list[Origin]) -> list[Origin]:
        if equation.primitive.name in HANDS_ON:
            return inputs
        if equation.primitive.name in known:
            return [Origin()] * len(equation.outvars)
        if not (has_regions(equation) and any(x.groups for x in inputs)):
            return [Origin.join(inputs, equation)] * len(equation.outvars)
        found = wiring_of(equation).forward(
            inputs,
            lambda region, values: origins(region.jaxpr, values, known),
            Origin.join,
        )
        return [Origin.join([x, *found.decisions], equation) for x in found.outputs]

    return follow(jaxpr, inputs, results, lambda _: Origin())


def derivative_calls(jaxpr: AnyJaxpr, *places: int) -> float:
    """Return how often functions with a `custom_vjp` are given some inputs of a jaxpr.

    Infinite if that is not known, as in a branch or a loop that ends by a condition.
    NaN if anything else reads the inputs, or returns them.

    Args:
        jaxpr: the jaxpr.
        places: the inputs, by their indices.
    """
    jaxpr, _ = open_jaxpr(jaxpr)
    chosen = {jaxpr.invars[i] for i in places}
    is_returned = any(x in chosen for x in jaxpr.outvars if not is_literal(x))
    count = math.nan if is_returned else 0.0
    for equation in live_equations(jaxpr):
        reads = [not is_literal(x) and x in chosen for x in equation.invars]
        if not any(reads):
            continue
        if not has_regions(equation):
            return math.nan
        if equation.primitive.name == "custom_vjp_call":
            count += 1
            continue
        wiring = wiring_of(equation)
        times = math.inf if wiring.deciding else run_count(equation) or math.inf
        for region in wiring.regions:
            within = [i for i, is_read in enumerate(region.read(reads)) if is_read]
            if calls := derivative_calls(region.jaxpr, *within):
                count += times * calls
    return count


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
        subtracted: those that a term is made smaller by, and does not depend on itself.
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


def flows(jaxpr: AnyJaxpr, inputs: Sequence[Flow] = ()) -> list[Flow]:
    """Return how the inputs of `jaxpr` reach each of its outputs.

    Args:
        jaxpr: the jaxpr of any function.
        inputs: for each input of `jaxpr`, the inputs of an outer jaxpr that reach it;
            by default, only itself.
    """
    inputs = inputs or own_flows(jaxpr)

    def results(equation: Equation, inputs: list[Flow]) -> list[Flow]:
        outputs = _results(equation, inputs)
        return list(map(_without_scalars, outputs, equation.outvars))

    return follow(jaxpr, inputs, results, _constant)


def own_flows(jaxpr: AnyJaxpr, shrinking: Collection[int] = ()) -> list[Flow]:
    """Return the flows of the inputs of `jaxpr`, each of which is only itself.

    Args:
        jaxpr: the jaxpr.
        shrinking: the inputs that are known to be smaller than 1, by their indices.
    """
    variables = open_jaxpr(jaxpr)[0].invars
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
    if name in MOVES:
        return inputs if name in HANDS_ON else inputs[:1] * count
    union = union_of(inputs)
    if name in JOINS:
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
    if is_product(equation):
        return [result._replace(multiplied=union.reached_by)] * count
    if name in FACTORIZATIONS:
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
    return is_literal(atom) and is_always(atom.val, lambda x: x % 1 == 0)


def union_of(each: Iterable[Flow]) -> Flow:
    """Return the flow of a value that may be any of these, or is made of all."""
    # All fields but `shrinks` are sets.
    fields = zip(*(flow[:-1] for flow in each), strict=True)
    unions: list[Any] = [_NONE.union(*sets) for sets in fields]
    return Flow(*unions)


def _without_scalars(flow: Flow, var: Any) -> Flow:
    """Return the flow of `var`, without its sources if it is a single number."""
    is_array = getattr(var.aval, "size", 0) > 1
    return flow if is_array else Flow(shrinks=flow.shrinks)


def _constant(value: Any) -> Flow:
    return Flow(shrinks=is_always(value, lambda x: abs(x) < 1))


# Of a negative number they are NaN.
_ROOTS = frozenset({"sqrt", "rsqrt", "pow"})
# An array that is moved or copied is where it was asked to be.
_COPIES = HANDS_ON | {"copy", "copy_p", "device_put"}
# The parameter that holds the sharding which an equation asks for.
_ASK = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


def asked_shardings(jaxpr: AnyJaxpr, inputs: Sequence[Any] = ()) -> list[Any]:
    """Return for each output the sharding that the function asks for, or None.

    Args:
        jaxpr: the jaxpr.
        inputs: the same for each input; by default, None.
    """

    def results(equation: Equation, inputs: list[Any]) -> list[Any]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in _ASK:
            return [equation.params[_ASK[name]]]
        if name in PLAIN_CALLS:
            return asked_shardings(wiring_of(equation).regions[0].jaxpr, inputs)
        return inputs if name in _COPIES else [None] * count

    inputs = inputs or [None] * len(open_jaxpr(jaxpr)[0].invars)
    return follow(jaxpr, inputs, results, lambda _: None)
