"""Equations whose jaxpr is hidden in an object: operations of `jax.experimental.hijax`.

Such an equation has one parameter, an object that computes it by its method `expand`.
If `jax_remat3`, `jax_custom_vjp3` or `jax_custom_jvp3` are on, JAX makes such
operations of `jax.checkpoint`, of its names, and of functions with derivative rules.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._extend import ClosedJaxpr
from optax_mp.jaxprs._tracing import is_shaped, trace_jaxpr

# What such an object says of itself: what it computes, and of which arrays.
_METHODS = ("expand", "in_tree", "out_tree", "in_avals_flat", "params")


def operation_of(equation: _jaxpr.Equation) -> Any:
    """Return the object that hides what an equation computes, or None."""
    if len(equation.params) != 1:
        return None
    (found,) = equation.params.values()
    return found if all(hasattr(found, name) for name in _METHODS) else None


def hidden_jaxpr(equation: _jaxpr.Equation) -> ClosedJaxpr | None:
    """Return the jaxpr of what a hidden operation computes.

    None for other equations, and for operations that cannot be expanded, such as those
    with references.
    """
    operation = operation_of(equation)
    if operation is None:
        return None
    # By identity: operations may be equal although their arrays differ in shape.
    key = id(operation)
    if key not in _expanded:
        _expanded[key] = _expand(operation)
        weakref.finalize(operation, _expanded.pop, key).atexit = False
    return _expanded[key]


_expanded: dict[int, ClosedJaxpr | None] = {}


def _expand(operation: Any) -> ClosedJaxpr | None:
    avals = operation.in_avals_flat
    if not all(map(is_shaped, avals)):
        return None

    def run(*args: Any) -> Any:
        made = operation.expand(*operation.in_tree.unflatten(args))
        return operation.out_tree.flatten_up_to(made)

    try:
        return trace_jaxpr(run, avals)
    except Exception:  # whatever the method of another package raises
        return None


def call_kind(equation: _jaxpr.Equation) -> str:
    """Return the name of the primitive that a hidden operation stands for.

    It is one of `_PROGRAMS`, or `""` for other operations. An equation of another
    primitive has its own name.
    """
    operation = operation_of(equation)
    if operation is None:
        return equation.primitive.name
    return _kind_of_class(type(operation))


def name_of(equation: _jaxpr.Equation) -> str:
    """Return the name of a primitive, with the class of a hidden operation."""
    operation, name = operation_of(equation), equation.primitive.name
    return name if operation is None else f"{name} ({type(operation).__name__})"


@functools.cache
def _kind_of_class(kind: type) -> str:
    """Return what JAX makes operations of a class of, learned from tiny programs."""
    for name, program in _PROGRAMS.items():
        operations = map(operation_of, jax.make_jaxpr(program)(1.0).eqns)
        for x in (x for x in operations if type(x) is kind):
            # The settings are there by name, or it could not be bound again.
            is_there = _SETTINGS.get(name, {}).items() <= x.params.items()
            return name if is_there and _linearizes(program) else ""
    return ""


def _linearizes(program: Any) -> bool:
    """Return whether JAX has all derivatives of an operation; 0.10 has not."""
    try:
        jax.eval_shape(lambda x: jax.linearize(program, x)[0], 1.0)
    except NotImplementedError:
        return False
    return True


def bind_again(
    equation: _jaxpr.Equation, function: Callable[..., list[Any]], inputs: Sequence[Any]
) -> list[Any]:
    """Return `function(*inputs)` in an operation like that of an equation.

    It works for the kinds `"remat2"` and `"name"`; derivative rules belong to one
    function.
    """
    params = operation_of(equation).params
    if call_kind(equation) == "name":
        return [checkpoint_name(x, params["name"]) for x in function(*inputs)]
    settings = {k: v for k, v in params.items() if k in ("policy", "prevent_cse")}
    return jax.checkpoint(function, **settings)(*inputs)


_SETTINGS: dict[str, dict[str, Any]] = {
    "remat2": {"policy": jax.checkpoint_policies.save_only_these_names()},
    "name": {"name": "x"},
}


@jax.custom_jvp
def _with_jvp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@jax.custom_vjp
def _with_vjp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_with_jvp.defjvp(lambda x, dx: (_with_jvp(*x), *dx))
_with_vjp.defvjp(lambda x: (_with_vjp(x), None), lambda _, dy: (dy,))
# Functions, so that the switches count that are on when an operation is met.
_PROGRAMS = {
    "remat2": lambda x: jax.checkpoint(jnp.sin, **_SETTINGS["remat2"])(x),
    "name": lambda x: checkpoint_name(x, **_SETTINGS["name"]),
    "custom_jvp_call": lambda x: _with_jvp(x),
    "custom_vjp_call": lambda x: _with_vjp(x),
}
