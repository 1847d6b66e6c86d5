"""A jaxpr as one list of equations, with calls of `jit` and branches opened."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp._jax._contact import is_plain_call
from optax_mp._jax._control_flow import PLAIN_CALLS
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    Literal,
    any_equation,
    jaxprs_within,
    open_jaxpr,
    run_equations,
)
from optax_mp._jax._primitives import FACTORIZATIONS, is_product

_OPENED = PLAIN_CALLS | {"cond"}
_SLOW = FACTORIZATIONS | {"while", "scan", "sort", "custom_linear_solve"}


@dataclass(eq=False, slots=True)
class Value:
    """A value of a program: one of its inputs, or an output of a node."""

    aval: Any
    producer: "Node | None" = None


@dataclass(eq=False, slots=True)
class Node:
    """An equation on values of a program.

    Attributes:
        place: its index among the nodes of the program.
        equation: the equation.
        inputs: values, or literals.
        reads: the values among these.
        outputs: the values that it computes.
    """

    place: int
    equation: Equation
    inputs: Sequence[Any]
    reads: Sequence[Value]
    outputs: Sequence[Value] = ()


def can_open(equation: Equation, inputs: Sequence[Any]) -> bool:
    """Return whether the equations of a call, or of all branches, can be a program's.

    No branch may take long, unless it is known which of them runs.
    """
    if equation.primitive.name in PLAIN_CALLS:
        return is_plain_call(equation)
    takes_long = any(any_equation(x, _is_slow) for x in jaxprs_within(equation))
    is_known = isinstance(inputs[0], Literal)
    return not equation.effects and (is_known or not takes_long)


def _is_slow(equation: Equation) -> bool:
    """Return whether an equation is a loop, a product or a factorization."""
    return is_product(equation) or equation.primitive.name in _SLOW


@dataclass
class Program:
    """A jaxpr as one list of equations.

    Attributes:
        inputs: its inputs.
        opens: whether the equations of a call or a `cond` are equations of the program.
            All branches of a `cond` are then computed, and their results chosen one by
            one, unless it is known which of them runs.
        outputs: its outputs: values or literals.
        nodes: its equations, in order.
        constants: the arrays of the values that are neither inputs nor outputs of
            equations.
        has_branches: whether a `cond` was opened.
    """

    inputs: list[Value]
    opens: Callable[[Equation, Sequence[Any]], bool]
    outputs: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[Value, Any] = field(default_factory=dict)
    has_branches: bool = False

    @classmethod
    def of(
        cls,
        jaxpr: AnyJaxpr,
        opens: Callable[[Equation, Sequence[Any]], bool] = can_open,
    ) -> "Program":
        """Return the program of a jaxpr."""
        opened, _ = open_jaxpr(jaxpr)
        program = cls([Value(var.aval) for var in opened.invars], opens)
        program.outputs = program.open(jaxpr, program.inputs)
        return program

    def open(self, jaxpr: AnyJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Add the equations of a jaxpr that reads `inputs`; return its outputs."""
        jaxpr, consts = open_jaxpr(jaxpr)
        values: dict[Any, Any] = {var: Value(var.aval) for var in jaxpr.constvars}
        self.constants.update(zip(values.values(), consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        # Calls are opened, because the tails of leaves reach through them: an optimizer
        # consists of many calls, and each function of `jax.numpy` is one.
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            args = [x if isinstance(x, Literal) else values[x] for x in equation.invars]
            if name not in _OPENED or not self.opens(equation, args):
                made = self.add(equation, args)
            elif name == "cond":
                made = self._open_branches(equation, args)
            else:
                made = self.open(jaxprs_within(equation)[0], args)
            values.update(zip(equation.outvars, made, strict=True))
        return [x if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]

    def _open_branches(self, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
        self.has_branches = True
        (which, *operands), branches = inputs, equation.params["branches"]
        # The one of `optax.MultiSteps` is known, unless it may leave out gradients.
        if isinstance(which, Literal):
            return self.open(branches[which.val], operands)
        results = [self.open(x, operands) for x in branches]
        # Both branches may return the same input, such as an unchanged state.
        return [
            cases[0]
            if all(case is cases[0] for case in cases)
            else self.trace(lax.select_n, which, *cases)
            for cases in zip(*results, strict=True)
        ]

    def trace(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Add the equations of a function of values or literals; return its output."""
        avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
        return self.open(jax.make_jaxpr(function)(*avals), inputs)[0]

    def add(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Value]:
        """Add an equation on values or literals; return its outputs."""
        reads = [x for x in inputs if isinstance(x, Value)]
        node = Node(len(self.nodes), equation, inputs, reads)
        node.outputs = [Value(var.aval, node) for var in equation.outvars]
        self.nodes.append(node)
        return node.outputs


def backward_slice(
    targets: Iterable[Any], stops_at: Callable[[Value], bool] = lambda _: False
) -> list[Node]:
    """Return the nodes that some values need, in the order of the program.

    Args:
        targets: the values, or literals.
        stops_at: which values to take as given. Targets are passed in any case.
    """
    nodes: set[Node] = set()
    stack = values_in(targets)
    while stack:
        node = stack.pop().producer
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += filterfalse(stops_at, node.reads)
    return sorted(nodes, key=attrgetter("place"))


def reads_of(nodes: Iterable[Node]) -> list[Value]:
    """Return the values that some nodes read and do not compute."""
    made = {value for node in nodes for value in node.outputs}
    read = dict.fromkeys([value for node in nodes for value in node.reads])
    return [value for value in read if value not in made]


def run_nodes(nodes: Iterable[Node], values: dict[Any, Any]) -> None:
    """Evaluate some equations, in order; add their outputs to `values`."""
    run_equations([(x.equation, x.inputs, x.outputs) for x in nodes], values)


def read_inputs(values: Mapping[Value, Any], node: Node) -> list[Any]:
    """Return the arrays and numbers that the inputs of a node stand for."""
    return [values[x] if isinstance(x, Value) else x.val for x in node.inputs]


def read_output(values: Mapping[Value, Any], atom: Any) -> Any:
    """Return an output as an array; a literal is a plain number."""
    array = values[atom] if isinstance(atom, Value) else atom.val
    is_array = isinstance(array, jax.Array)
    return array if is_array else jnp.asarray(array, atom.aval.dtype)


def values_in(atoms: Iterable[Any]) -> list[Value]:
    """Return those that are values, and no literals."""
    return [atom for atom in atoms if isinstance(atom, Value)]


def structural_key(
    nodes: Sequence[Node], reads: Sequence[Value], outputs: Sequence[Any]
) -> Hashable:
    """Return a key for what nodes compute: equal if they only read other values."""
    # They are alike if they are the same, in the same order, on values of the same
    # types with the same numbers. Names of variables do not matter, nor where a value
    # was computed.
    number = {value: i for i, value in enumerate(reads)}

    key: list[Hashable] = [value.aval for value in reads]
    for node in nodes:
        params: Hashable = tuple(node.equation.params.items())
        try:
            hash(params)
        except TypeError:
            params = object()  # equal to nothing else
        key += [node.equation.primitive, params]
        key += [
            number[x] if isinstance(x, Value) else _bytes_of(x) for x in node.inputs
        ]
        for value in node.outputs:
            number[value] = len(number)
            key.append(value.aval)
    key += [number[x] if isinstance(x, Value) else _bytes_of(x) for x in outputs]
    return tuple(key)


def _bytes_of(literal: Any) -> Hashable:
    # 0.0 equals -0.0, and NaN not even itself.
    return literal.aval, np.asarray(literal.val).tobytes()
