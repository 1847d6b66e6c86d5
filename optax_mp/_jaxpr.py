"""Running a jaxpr equation by equation: the one door to `jax.extend`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

Run = Callable[[JaxprEqn, list[Any]], Sequence[Any]]


def is_computed(atom: Any, jaxpr: Any) -> bool:
    """Return whether an output of `jaxpr` comes from one of its equations."""
    given = (*jaxpr.invars, *jaxpr.constvars)
    return not isinstance(atom, Literal) and all(atom is not var for var in given)


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], run: Run) -> list[Any]:
    """Return the outputs of `closed` for `args`; `run` says what an equation does.

    It gets the equation and the values of its inputs, and returns those of its outputs.
    """
    jaxpr = closed.jaxpr
    known: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        outputs = run(equation, [value(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, outputs, strict=True))
    # As arrays, though a literal is a plain number.
    return [jnp.asarray(value(atom), atom.aval.dtype) for atom in jaxpr.outvars]


def bind(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation as it is written, where and named as it is."""
    bound: Any = equation.primitive.get_bind_params(equation.params)
    # Up to JAX 0.9.0 with the functions among the parameters apart.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager, _name_scope(equation):
        outputs = equation.primitive.bind(*functions, *inputs, **params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _name_scope(equation: JaxprEqn) -> Any:
    names = str(equation.source_info.name_stack)
    return jax.named_scope(names) if names else contextlib.nullcontext()
