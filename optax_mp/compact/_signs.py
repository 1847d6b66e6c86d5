"""Which outputs of a function are never negative, read off its jaxpr.

A moment that is never negative needs no bit for its sign, so its codes are finer. A
square is recognised in every form: as `x * x` with factors between, as a power, or as a
product by `einsum`. So is its average, also in the form of a step from the old value
towards the new one, `v + c * (s - v)` with `c` between 0 and 1.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_mp._jax._control_flow import Region, has_regions, wiring_of
from optax_mp._jax._dataflow import follow
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    is_always,
    is_literal,
    is_shaped,
    open_jaxpr,
)
from optax_mp._jax._primitives import HANDS_ON, KEEPS_SIGN, MOVES, NEVER_NEGATIVE


class Fact(NamedTuple):
    """The facts known of a value. Other values are named by their variables.

    Attributes:
        nonnegative: that no entry is negative.
        at_most_one: that no entry is larger than 1.
        value: the variable that holds the same.
        multiple_of: a variable that it is a multiple of, by factors that are not
            negative, perhaps a different one for each entry.
        bounds: `(1, v)` says that it is at most the variable `v`, `(-1, v)` that it is
            at least `-v`, if `v` is not negative.
    """

    nonnegative: bool = False
    at_most_one: bool = False
    value: Any = None
    multiple_of: Any = None
    bounds: frozenset[tuple[int, Any]] = frozenset()

    @property
    def is_fraction(self) -> bool:
        """True if all entries are between 0 and 1."""
        return self.nonnegative and self.at_most_one


def nonnegative_states(init: AnyJaxpr, update: AnyJaxpr, others: int) -> list[bool]:
    """Return which arrays of a state are never negative: at first, or after an update.

    Args:
        init: from anything to the state.
        update: from `others` arrays, the state and as many arrays again to any outputs,
            the last of them the new state.
        others: how many inputs of `update` are on either side of the state.
    """
    unknown = [Fact()] * others
    # In the next update, only facts that name no other value still hold.
    state = list(map(_only, facts_of(init, [Fact()] * len(open_jaxpr(init)[0].invars))))
    while True:
        new = facts_of(update, [*unknown, *state, *unknown])
        new = new[len(new) - len(state) :]
        still = [_join([old, _only(x)]) for old, x in zip(state, new, strict=True)]
        if still == state:
            return [x.nonnegative for x in state]
        state = still


def facts_of(jaxpr: AnyJaxpr, inputs: Sequence[Fact]) -> list[Fact]:
    """Return the facts of the outputs of `jaxpr`, from its inputs'."""
    named = list(map(_of_variable, open_jaxpr(jaxpr)[0].invars, inputs))
    return follow(jaxpr, named, _results, _fact_of_number)


def _of_variable(var: Any, fact: Fact) -> Fact:
    """Return what is known of a variable, and name it if it has no name yet."""
    # Integers do not count: their squares and sums may wrap around.
    dtype = var.aval.dtype if is_shaped(var.aval) else jnp.int32
    if not jnp.issubdtype(dtype, jnp.floating):
        fact = Fact(dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger))
    value = fact.value or var
    return fact._replace(value=value, multiple_of=fact.multiple_of or value)


def _results(equation: Equation, inputs: list[Fact]) -> list[Fact]:
    """Return what is known of each output of an equation."""
    if has_regions(equation):
        facts = _through_regions(equation, inputs)
    elif equation.primitive.name in HANDS_ON:
        facts = inputs
    else:
        facts = [_result(equation, inputs)] * len(equation.outvars)
    return list(map(_of_variable, equation.outvars, facts))


def _through_regions(equation: Equation, inputs: list[Fact]) -> list[Fact]:
    wiring = wiring_of(equation)
    # In a loop a variable holds something else in each iteration, and in each shard.
    runs_once = not (wiring.repeats or wiring.is_sharded)

    def through(region: Region, facts: Sequence[Fact]) -> list[Fact]:
        facts = facts if runs_once else list(map(_only, facts))
        names = {name for x in facts for name in (x.value, x.multiple_of)}
        # Variables inside mean nothing outside: another call has the same ones.
        return [_only(x, names) for x in facts_of(region.jaxpr, facts)]

    return wiring.forward(inputs, through, _join).outputs


def _result(equation: Equation, inputs: list[Fact]) -> Fact:
    """Return what is known of the outputs of an equation without regions."""
    holds = [x.nonnegative for x in inputs]
    match equation.primitive.name:
        case "mul":
            return _product(*inputs)
        case "sub":
            return _difference(equation.invars[0], *inputs)
        case "add":
            a, b = inputs
            return Fact(all(holds) or _is_step(a, b, -1) or _is_step(b, a, -1))
        case "div":
            base = inputs[0].multiple_of if holds[1] else None
            return Fact(all(holds), multiple_of=base)
        case "convert_element_type":
            return inputs[0]._replace(value=None, bounds=frozenset())
        case "dot_general":
            return Fact(all(holds) or (_are_alike(*inputs) and _pairs_places(equation)))
        case "max":
            return Fact(any(holds))
        case "integer_pow":
            return Fact(holds[0] or equation.params["y"] % 2 == 0)
        case "pow":
            is_even = _is_number(equation.invars[1], lambda y: y % 2 == 0)
            return Fact(holds[0] or is_even)
        case "select_n":
            return Fact(all(holds[1:]))
        case "clamp":
            # The lower bound does not decide: the upper one may be smaller.
            return Fact(holds[2] and (holds[0] or holds[1]))
        case name:
            keeps = name in KEEPS_SIGN and all(holds)
            moves_fractions = name in MOVES and all(x.at_most_one for x in inputs)
            return Fact(name in NEVER_NEGATIVE or keeps, moves_fractions)


def _product(a: Fact, b: Fact) -> Fact:
    factor, x = (a, b) if a.is_fraction else (b, a)
    scaled = b if a.nonnegative else a if b.nonnegative else Fact()
    return Fact(
        (a.nonnegative and b.nonnegative) or _are_alike(a, b),
        a.is_fraction and b.is_fraction,
        multiple_of=scaled.multiple_of,
        bounds=x.bounds if factor.is_fraction else frozenset(),
    )


def _difference(minuend: Any, a: Fact, b: Fact) -> Fact:
    is_from_one = _is_number(minuend, lambda x: x == 1)
    bounds = {(-1, b.value)} if a.nonnegative else set()
    bounds |= {(1, a.value)} if b.nonnegative else set()
    return Fact(
        (is_from_one and b.at_most_one) or _is_step(a, b, 1),
        is_from_one and b.nonnegative,
        bounds=frozenset(x for x in bounds if x[1] is not None),
    )


def _is_step(start: Fact, step: Fact, sign: int) -> bool:
    """Return whether a step from a value does not pass 0."""
    return start.nonnegative and (sign, start.value) in step.bounds


def _are_alike(a: Fact, b: Fact) -> bool:
    """Return whether two values have the same sign, entry by entry."""
    return a.multiple_of is not None and a.multiple_of is b.multiple_of


def _pairs_places(equation: Equation) -> bool:
    """Return whether a product multiplies entries at equal places only."""
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    ndim = equation.invars[0].aval.ndim
    is_paired = (*left, *left_batch) == (*right, *right_batch)
    return is_paired and len(left) + len(left_batch) == ndim


def _join(facts: Sequence[Fact]) -> Fact:
    """Return what is known of a value that may be any of several."""
    first, *others = facts
    return Fact(
        all(x.nonnegative for x in facts),
        all(x.at_most_one for x in facts),
        first.value if all(x.value is first.value for x in others) else None,
        first.multiple_of if all(_are_alike(first, x) for x in others) else None,
        first.bounds.intersection(*(x.bounds for x in others)),
    )


def _only(x: Fact, names: Collection[Any] = ()) -> Fact:
    """Return what is known of a value by itself and by variables of these names."""
    value, base = (y if y in names else None for y in (x.value, x.multiple_of))
    bounds = frozenset(y for y in x.bounds if y[1] in names)
    return Fact(x.nonnegative, x.at_most_one, value, base, bounds)


def _fact_of_number(value: Any) -> Fact:
    is_nonnegative = is_always(value, lambda x: x >= 0)
    return Fact(is_nonnegative, is_always(value, lambda x: x <= 1))


def _is_number(atom: Any, test: Callable[[Any], Any]) -> bool:
    """Return whether an input is written as a single number with some property."""
    return is_literal(atom) and np.ndim(atom.val) == 0 and is_always(atom.val, test)
