"""Lower a step for a CPU: one large leaf after another, and some functions apart.

XLA for CPUs starts all that it can at once. The float32 values of all leaves would
exist together, in fresh memory, whose page faults take longer than the arithmetic. If
each leaf waits for the one before, it gets the memory of that.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    bind,
    evaluate,
    groups_with_common,
    is_literal,
    is_shaped,
    open_jaxpr,
)

# The primitive of a step. An inner transformation may have one of its own.
NAME = "optax_mp_step"
# The functions that XLA for CPUs must not inline. It computes each result in a loop of
# its own and copies what a later one reads again. Within such a function it does not.
_APART = "advance", "_rounding_keys", "_coded_with_shifts"
# Elements. The values of smaller leaves need no new pages.
_LARGE = 2**16


def run_on_cpu(*inputs: Any, equation: Equation, is_in_turn: bool) -> list[Any]:
    """Return the outputs of a call of `jit`.

    Args:
        inputs: its inputs.
        equation: the call.
        is_in_turn: whether leaves wait for each other. Several devices would have to
            send each other an element of each leaf.
    """
    jaxpr = equation.params["jaxpr"]
    if not (is_in_turn and _codes_of(jaxpr)):
        return evaluate(jaxpr, inputs, _run_apart)
    opened = jax.make_jaxpr(lambda *xs: evaluate(jaxpr, xs, _open_calls))(*inputs)
    return _evaluate_in_turn(opened, inputs)


def _open_calls(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Bind the equations within calls that may be of several leaves."""
    name, several = equation.primitive.name, len(equation.outvars) > 1
    if name == NAME or (name == "jit" and several and not _is_apart(equation)):
        return evaluate(equation.params["jaxpr"], inputs, _open_calls)
    return bind(equation, inputs)


def _run_apart(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    name = equation.params.get("name")
    if equation.primitive.name == NAME or name == "choose_step":
        return evaluate(equation.params["jaxpr"], inputs, _run_apart)
    if not _is_apart(equation):
        return bind(equation, inputs)
    with set_xla_metadata(inlineable="false"):
        return bind(equation, inputs)


def _is_apart(equation: Equation) -> bool:
    """Return whether an equation is a call that XLA must not inline."""
    return equation.params.get("name") in _APART


def _large_leaves(jaxpr: AnyJaxpr) -> list[list[int]]:
    """Return for each large leaf the indices of the equations that only it needs.

    Equations belong together if they read a common array, or one reads an array that
    the other makes. Numbers connect nothing: they are computed before all leaves, and
    so is what they are made of, as for a global norm.
    """
    opened, _ = open_jaxpr(jaxpr)
    equations = opened.eqns
    maker = {var: i for i, x in enumerate(equations) for var in x.outvars}
    reads = [[v for v in x.invars if not is_literal(v)] for x in equations]
    arrays = [[v for v in vs if _size(v) > 1] for vs in reads]
    is_before = [not vs for vs in arrays]
    # From the last to the first: what is read by an equation before is before.
    numbers = {v for vs in reads for v in vs if _size(v) <= 1}
    numbers.update(v for v in opened.outvars if not is_literal(v) and _size(v) <= 1)
    needed = set(numbers)
    for i in reversed(range(len(equations))):
        if is_before[i] or needed.intersection(equations[i].outvars):
            is_before[i] = True
            needed.update(reads[i])

    members: list[set[Any]] = []
    for i, equation in enumerate(equations):
        # Constants, such as zeros, may be shared by leaves.
        own = {v for v in arrays[i] if v not in maker or arrays[maker[v]]}
        members.append(set() if is_before[i] else own.union(equation.outvars))
    groups = groups_with_common(members)
    codes = _codes_of(jaxpr)
    makers = {i for i, x in enumerate(equations) if codes.intersection(x.outvars)}
    makers -= {i for i, before in enumerate(is_before) if before}
    return [group for group in groups if makers.intersection(group)]


def _codes_of(jaxpr: AnyJaxpr) -> set[Any]:
    """Return the large outputs that are integers: a leaf is done when they are.

    XLA may add its updates to the params later, so these are no sign.
    """
    outputs: Any = open_jaxpr(jaxpr)[0].outvars
    return {
        v
        for v in outputs
        if not is_literal(v) and _size(v) >= _LARGE
        if jnp.issubdtype(v.aval.dtype, jnp.integer)
    }


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape) if is_shaped(atom.aval) else 0


def _evaluate_in_turn(jaxpr: AnyJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a jaxpr; each large leaf waits for the one before."""
    (opened, _), leaves = open_jaxpr(jaxpr), _large_leaves(jaxpr)
    turn_of = {i: turn for turn, leaf in enumerate(leaves) for i in leaf}
    own = {v: turn for i, turn in turn_of.items() for v in opened.eqns[i].outvars}
    codes = _codes_of(jaxpr)
    never: list[list[jax.Array]] = [[] for _ in leaves]
    waiting: dict[Any, Any] = {}

    def run_turn(equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        turn = turns.get(id(equation), 0)
        if turn and not _is_apart(equation):
            for i, var in enumerate(equation.invars):
                if is_literal(var) or own.get(var) == turn or not _can_wait(var):
                    continue
                if (turn, var) not in waiting:
                    last = functools.reduce(lax.bitwise_or, never[turn - 1])
                    waiting[turn, var] = _after(last, inputs[i])
                inputs[i] = waiting[turn, var]
        made = _run_apart(equation, inputs)
        for var, x in zip(equation.outvars, made, strict=True):
            if var in codes and var in own:
                with set_xla_metadata(inlineable="false"):
                    never[own[var]].append(_is_never(x))
        return made

    # What comes before, then leaf by leaf.
    order = sorted(range(len(opened.eqns)), key=lambda i: turn_of.get(i, -1))
    equations = [opened.eqns[i] for i in order]
    turns = {id(opened.eqns[i]): turn for i, turn in turn_of.items()}
    return evaluate(jaxpr, inputs, run_turn, equations)


def _can_wait(var: Any) -> bool:
    return _size(var) >= _LARGE and jnp.issubdtype(var.aval.dtype, jnp.floating)


@jax.jit
def _is_never(codes: jax.Array) -> jax.Array:
    """Return False, in a way for which XLA has to compute `codes`."""
    first = lax.slice(codes, (0,) * codes.ndim, (1,) * codes.ndim)
    number = lax.convert_element_type(lax.reshape(first, ()), jnp.int32)
    # More ones than there are bits. XLA knows what `&` and `>` make of each other.
    return lax.gt(lax.population_count(number), np.int32(32))


@jax.jit
def _after(is_never: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x`, once `is_never` is computed."""
    return lax.select(is_never, lax.full_like(x, 0), x)
