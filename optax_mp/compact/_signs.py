"""Which outputs of a function are never negative, read off its jaxpr.

A moment that is never negative needs no bit for its sign, so its codes are finer. A
square is recognised in every form: as `x * x` with factors between, as a power, or as a
product by `einsum`. So is its average, also in the form of a step from the old value
towards the new one, `v + c * (s - v)` with `c` between 0 and 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_mp._jax._control_flow import has_regions, wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, is_literal, open_jaxpr
from optax_mp._jax._primitives import KEEPS_SIGN, MOVES, NEVER_NEGATIVE
from optax_mp._jax._wiring import Region


class Fact(NamedTuple):
    """What is known of a value. Other values are named by their variables.

    Attributes:
        nonnegative: that no entry is negative.
        at_most_one: that no entry is larger than 1.
        value: the variable that holds the same.
        multiple_of: a variable of which it is a multiple by factors that are not
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
        """Whether all entries are between 0 and 1."""
        return self.nonnegative and self.at_most_one


def nonnegative_outputs(jaxpr: AnyJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs of `jaxpr` are known not to be negative.

    Args:
        jaxpr: the jaxpr of any function.
        inputs: for each of its inputs whether it is known not to be negative.
    """
    return [x.nonnegative for x in facts_of(jaxpr, list(map(Fact, inputs)))]


def nonnegative_states(
    init: AnyJaxpr, update: AnyJaxpr, before: int, after: int
) -> list[bool]:
    """Return which arrays of a state are never negative: at first, or after an update.

    Args:
        init: from anything to the state.
        update: from `before` arrays, the state and `after` arrays to any outputs, of
            which the last are the new state.
        before: how many inputs of `update` precede the state.
        after: how many follow it.
    """
    # In the next update, only facts that name no other value still hold.
    state = [
        _alone(x) for x in facts_of(init, [Fact()] * len(open_jaxpr(init)[0].invars))
    ]
    while True:
        inputs = [*[Fact()] * before, *state, *[Fact()] * after]
        new = facts_of(update, inputs)[-len(state) :] if state else []
        still = [_join([old, _alone(x)]) for old, x in zip(state, new, strict=True)]
        if still == state:
            return [x.nonnegative for x in state]
        state = still


def facts_of(jaxpr: AnyJaxpr, inputs: Sequence[Fact]) -> list[Fact]:
    """Return the facts of the outputs of `jaxpr`, from those of its inputs."""
    jaxpr, consts = open_jaxpr(jaxpr)
    facts: dict[Any, Fact] = {}

    def learn(var: Any, fact: Fact) -> None:
        value = fact.value or var
        base = fact.multiple_of or value
        facts[var] = fact._replace(value=value, multiple_of=base)

    for var, const in zip(jaxpr.constvars, consts, strict=True):
        learn(var, _fact_of_number(const))
    for var, fact in zip(jaxpr.invars, inputs, strict=True):
        learn(var, fact)

    def read(atom: Any) -> Fact:
        return _fact_of_number(atom.val) if is_literal(atom) else facts[atom]

    for equation in jaxpr.eqns:
        facts_in = list(map(read, equation.invars))
        if has_regions(equation):
            results = _through_regions(equation, facts_in)
        else:
            results = [_result(equation, facts_in)] * len(equation.outvars)
        for var, result in zip(equation.outvars, results, strict=True):
            # Integers do not count: their squares and sums may wrap around.
            unknown = Fact(nonnegative=_is_unsigned(var.aval))
            learn(var, result if _is_real(var.aval) else unknown)
    outvars: Any = jaxpr.outvars
    return list(map(read, outvars))


def _through_regions(equation: Equation, inputs: list[Fact]) -> list[Fact]:
    wiring = wiring_of(equation)
    # In a loop a variable holds something else in each iteration, and in each shard.
    runs_once = not (wiring.repeats or wiring.is_sharded)

    def through(region: Region, facts: Sequence[Fact]) -> list[Fact]:
        facts = facts if runs_once else list(map(_alone, facts))
        names = {name for x in facts for name in (x.value, x.multiple_of)}
        # Variables inside mean nothing outside: another call has the same ones.
        return [_only(names, x) for x in facts_of(region.jaxpr, facts)]

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
            return Fact(
                all(holds), multiple_of=inputs[0].multiple_of if holds[1] else None
            )
        case "optax_mp_place_like":
            return inputs[0]
        case "convert_element_type":
            return inputs[0]._replace(value=None, bounds=frozenset())
        case "dot_general":
            return Fact(all(holds) or (_are_alike(*inputs) and _pairs_places(equation)))
        case "max":
            return Fact(any(holds))
        case "integer_pow":
            return Fact(holds[0] or equation.params["y"] % 2 == 0)
        case "pow":
            return Fact(
                holds[0] or _is_number(equation.invars[1], lambda y: y % 2 == 0)
            )
        case "select_n":
            return Fact(all(holds[1:]))
        case "clamp":
            # The lower bound alone does not decide: the upper one may be smaller.
            return Fact(holds[2] and (holds[0] or holds[1]))
        case name:
            moved = name in MOVES and all(x.at_most_one for x in inputs)
            return Fact(
                name in NEVER_NEGATIVE or (name in KEEPS_SIGN and all(holds)), moved
            )


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


def _alone(x: Fact) -> Fact:
    """Return what is known of a value by itself."""
    return Fact(x.nonnegative, x.at_most_one)


def _only(names: set[Any], x: Fact) -> Fact:
    """Return what is known of a value by itself and by variables of these names."""
    value, base = (y if y in names else None for y in (x.value, x.multiple_of))
    return Fact(
        *_alone(x)[:2], value, base, frozenset(y for y in x.bounds if y[1] in names)
    )


def _is_unsigned(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (
        dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger)
    )


def _is_real(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _fact_of_number(value: Any) -> Fact:
    try:
        value = np.asarray(value)
        return Fact(bool(np.all(value >= 0)), bool(np.all(value <= 1)))
    except TypeError:  # not a number, such as a random key, or a traced value
        return Fact()


def _is_number(atom: Any, test: Callable[[Any], bool]) -> bool:
    """Return whether an input is written as a single number with some property."""
    return is_literal(atom) and np.ndim(atom.val) == 0 and bool(test(atom.val))
