"""A jaxpr as one list of equations, with calls of `jit` and branches opened."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp._jax._contact import is_plain_call
from optax_mp._jax._control_flow import PLAIN_CALLS, wiring_of
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    Location,
    bind,
    is_literal,
    jaxprs_within,
    open_jaxpr,
)
from optax_mp._jax._primitives import FACTORIZATIONS, is_product

_SLOW = FACTORIZATIONS | {"while", "scan", "sort", "custom_linear_solve"}


@dataclass(eq=False, slots=True)
class Value:
    """A value of a program: one of its inputs, or an output of an equation."""

    aval: Any
    made_at: int | None = None


@dataclass(frozen=True, eq=False)
class Node:
    """An equation on values of a program, or on literals."""

    equation: Equation
    inputs: Sequence[Any]
    outputs: Sequence[Value]


@dataclass
class Program:
    """A jaxpr as one list of equations.

    Attributes:
        inputs: its inputs.
        outputs: its outputs: values or literals.
        nodes: its equations, in order.
        constants: the arrays of the values that are neither inputs nor outputs of
            equations.
        has_branches: whether the jaxpr has a `cond` that is opened: all of its branches
            are computed, and their results chosen one by one, unless it is known which
            of them runs.
    """

    inputs: list[Value]
    outputs: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[Value, Any] = field(default_factory=dict)
    has_branches: bool = False

    @classmethod
    def of(cls, jaxpr: AnyJaxpr) -> "Program":
        """Return the program of a jaxpr."""
        opened, _ = open_jaxpr(jaxpr)
        program = cls([Value(var.aval) for var in opened.invars])
        program.outputs = program.open(jaxpr, program.inputs)
        return program

    def open(self, jaxpr: AnyJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Add the equations of a jaxpr that reads `inputs`; return its outputs."""
        jaxpr, consts = open_jaxpr(jaxpr)
        values: dict[Any, Any] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            values[var] = Value(var.aval)
            self.constants[values[var]] = const
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return atom if is_literal(atom) else values[atom]

        # Calls are opened, because ends reach through them: an optimizer consists of
        # many calls, and each function of `jax.numpy` is one.
        for equation in jaxpr.eqns:
            args = [read(atom) for atom in equation.invars]
            if equation.primitive.name in PLAIN_CALLS and is_plain_call(equation):
                made = self.open(wiring_of(equation).regions[0].jaxpr, args)
            elif _is_choice(equation, args):
                made = self._open_branches(equation, args)
            else:
                made = self._add(equation, args)
            values.update(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _open_branches(self, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
        self.has_branches = True
        (which, *operands), branches = inputs, equation.params["branches"]
        # The one of `optax.MultiSteps` is known, unless it may leave out gradients.
        if is_literal(which):
            return self.open(branches[which.val], operands)
        results = [self.open(x, operands) for x in branches]
        return [self._choose(which, cases) for cases in zip(*results, strict=True)]

    def _add(self, equation: Equation, inputs: Sequence[Any]) -> list[Value]:
        made = [Value(var.aval, len(self.nodes)) for var in equation.outvars]
        self.nodes.append(Node(equation, inputs, made))
        return made

    def _choose(self, which: Any, cases: Sequence[Any]) -> Any:
        """Return one of several values."""
        # Both branches may return the same input, such as an unchanged state.
        if all(case is cases[0] for case in cases):
            return cases[0]
        avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in cases]
        index = jax.ShapeDtypeStruct((), which.aval.dtype)
        (equation,) = jax.make_jaxpr(lax.select_n)(index, *avals).eqns
        return self._add(equation, [which, *cases])[0]

    def behind(
        self,
        targets: Iterable[Any],
        stops_at: Callable[[Value], bool] = lambda _: False,
    ) -> tuple[list[Node], list[Value]]:
        """Walk backwards from some values.

        Args:
            targets: the values, or literals.
            stops_at: where to stop. Targets are passed in any case.

        Returns:
            The equations that the targets need, in order, and the values at which the
            walk stopped: these, and inputs.
        """
        # In the order of places, which is the jaxpr's, each equation comes after
        # those that it needs.
        places: set[int] = set()
        stops: dict[Value, None] = {}
        stack = values_in(targets)
        seen = set(stack)
        while stack:
            value = stack.pop()
            if value.made_at is None:
                stops[value] = None
                continue
            places.add(value.made_at)
            for read in values_in(self.nodes[value.made_at].inputs):
                if stops_at(read):
                    stops[read] = None
                elif read not in seen:
                    seen.add(read)
                    stack.append(read)
        return [self.nodes[place] for place in sorted(places)], list(stops)


def reads_of(nodes: Iterable[Node]) -> list[Value]:
    """Return the values that some equations read and do not make."""
    made = {value for node in nodes for value in node.outputs}
    read = dict.fromkeys(x for node in nodes for x in values_in(node.inputs))
    return [value for value in read if value not in made]


def run_nodes(nodes: Iterable[Node], values: dict[Value, Any]) -> None:
    """Evaluate some equations, in order; add their outputs to `values`."""
    with Location() as location:
        for node in nodes:
            args = [read(values, x) for x in node.inputs]
            with location.of(node.equation):
                made = bind(node.equation, args)
            values.update(zip(node.outputs, made, strict=True))


def _is_choice(equation: Equation, inputs: Sequence[Any]) -> bool:
    """Return whether an equation is a `cond` of which all branches can be computed.

    None of them may take long, unless it is known which of them runs.
    """
    if equation.primitive.name != "cond" or equation.effects:
        return False
    branches = [open_jaxpr(x)[0] for x in equation.params["branches"]]
    return is_literal(inputs[0]) or not any(map(_takes_long, branches))


def _takes_long(jaxpr: Any) -> bool:
    """Return whether a jaxpr has loops, products or factorizations."""

    def is_slow(equation: Equation) -> bool:
        inner = (open_jaxpr(x)[0] for x in jaxprs_within(equation))
        is_one = is_product(equation) or equation.primitive.name in _SLOW
        return is_one or any(map(_takes_long, inner))

    return any(map(is_slow, jaxpr.eqns))


def read(values: dict[Value, Any], atom: Any) -> Any:
    """Return the array that an input of a node stands for."""
    return values[atom] if isinstance(atom, Value) else atom.val


def read_output(values: dict[Value, Any], atom: Any) -> Any:
    """Return an output as an array; a literal is a plain number."""
    array = read(values, atom)
    is_array = isinstance(array, jax.Array)
    return array if is_array else jnp.asarray(array, atom.aval.dtype)


def values_in(atoms: Iterable[Any]) -> list[Value]:
    """Return those that are values, and no literals."""
    return [atom for atom in atoms if isinstance(atom, Value)]


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
