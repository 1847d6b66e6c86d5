"""Reading, running and changing jaxprs: the one door to `jax.extend`.

What differs between versions of JAX in a jaxpr is said here and nowhere else.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.extend.core import primitives as _primitives
from jax.sharding import PartitionSpec

_HERE = os.path.dirname(os.path.dirname(__file__))
AnyJaxpr = Jaxpr | ClosedJaxpr
Equation = Any  # a JaxprEqn, whose variables JAX types without dtype and shape
Run = Callable[[Equation, list[Any]], Sequence[Any]]

# The name of a jit (in `_placement`) whose first input is its output.
PLACE_LIKE = "place_like"

# What an equation that has other jaxprs inside does with them.
_KINDS = {
    "jit": "jit",
    "pjit": "jit",  # up to JAX 0.6
    "checkpoint": "remat",
    "remat": "remat",
    "remat2": "remat",
    "closed_call": "inline",
    "core_call": "inline",
    "scan": "scan",
    "while": "while",
    "cond": "cond",
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
    "custom_vjp_call_jaxpr": "custom_vjp",  # up to JAX 0.5
    "shard_map": "shard_map",
}
# The parameters that hold those jaxprs; of a while, the test comes first.
_INNER = ("cond_jaxpr", "body_jaxpr", "jaxpr", "call_jaxpr", "fun_jaxpr", "branches")


def kind(equation: Equation) -> str | None:
    """Return what an equation does with jaxprs inside it, or None if that is opaque."""
    return _KINDS.get(equation.primitive.name)


def inner_jaxprs(equation: Equation) -> list[AnyJaxpr]:
    """Return the jaxprs inside an equation that has a `kind`."""
    named = [equation.params[name] for name in _INNER if name in equation.params]
    return [jaxpr for group in named for jaxpr in _as_group(group)]


def jaxprs_within(equation: Equation) -> list[AnyJaxpr]:
    """Return all jaxprs among the parameters, whatever they are for."""
    values = [x for group in equation.params.values() for x in _as_group(group)]
    return [x for x in values if isinstance(x, Jaxpr | ClosedJaxpr)]


def _as_group(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def opened(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Return a jaxpr and its constants."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def scan_counts(equation: Equation) -> tuple[int, int]:
    """Return how many inputs of a scan are constants and how many its carry."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, *_ = params["ft_in"].unpack()  # JAX 0.11 and later
    return len(consts), len(carry)


def while_counts(equation: Equation) -> tuple[int, int]:
    """Return how many inputs of a while are constants of its test and its body."""
    return equation.params["cond_nconsts"], equation.params["body_nconsts"]


def is_literal(atom: Any) -> bool:
    """Return whether an input is a number written into the jaxpr."""
    return isinstance(atom, Literal)


def is_computed(atom: Any, jaxpr: Jaxpr) -> bool:
    """Return whether an output of `jaxpr` comes from one of its equations."""
    given = (*jaxpr.invars, *jaxpr.constvars)
    return not is_literal(atom) and all(atom is not var for var in given)


def depending_outputs(jaxpr: AnyJaxpr, inputs: Sequence[bool] = ()) -> list[bool]:
    """Return which outputs of `jaxpr` are computed from its inputs, or some of them."""
    jaxpr, _ = opened(jaxpr)
    given = inputs or [True] * len(jaxpr.invars)
    known: dict[Any, bool] = dict(zip(jaxpr.invars, given, strict=True))

    def depends(atom: Any) -> bool:
        return not is_literal(atom) and known.get(atom, False)

    for equation in jaxpr.eqns:
        sources = [depends(atom) for atom in equation.invars]
        outputs = [any(sources)] * len(equation.outvars)
        if kind(equation) == "jit" and any(sources):
            outputs = depending_outputs(inner_jaxprs(equation)[0], sources)
            if equation.params["name"] == PLACE_LIKE:
                outputs = sources[:1]
        known.update(zip(equation.outvars, outputs, strict=True))
    outvars: Any = jaxpr.outvars
    return [depends(atom) for atom in outvars]


def is_shaped(aval: Any) -> bool:
    """Return whether an abstract value is a plain array: no token and no reference."""
    return isinstance(aval, ShapedArray)


def retyped(aval: Any, dtype: Any) -> Any:
    """Return an abstract value of another dtype, placed and varying as it was."""
    # Of what is no number, such as a random key, the dtype stays.
    return aval if aval.dtype == dtype else aval.update(dtype=dtype, weak_type=False)


def aval_like(x: Any, dtype: Any) -> Any:
    """Return the abstract value of an array at another dtype."""
    return retyped(jax.typeof(x), dtype)


def scopes(equation: Equation) -> str:
    """Return the names that `jax.named_scope` gave an equation, as JAX writes them.

    Outermost first, as in `transpose(jvp(layer))/attention`.
    """
    stack = equation.source_info.name_stack
    return str(stack) if stack.stack else ""


def source_line(equation: Equation) -> str:
    """Return the user's line that an equation comes from, such as `model.py:12`.

    Where there is none, nothing.
    """
    place = source_info_util.summarize(equation.source_info)
    if place.startswith(_HERE):
        return ""  # of a function of a library, that we are the first to call
    # A path, a line, perhaps a column, and a function in brackets.
    found = re.match(r"(?:.*[/\\])?([^:/\\]+:\d+)", place)
    return found[1] if found else place


def primitive_names() -> set[str]:
    """Return the names of all primitives that JAX shows."""
    values = vars(_primitives).values()
    return {value.name for value in values if isinstance(value, Primitive)}


def evaluate(jaxpr: AnyJaxpr, args: Sequence[Any], run: Run) -> list[Any]:
    """Return the outputs of `jaxpr` for `args`; `run` says what an equation does.

    It gets the equation and the values of its inputs, and returns those of its outputs.
    """
    jaxpr, consts = opened(jaxpr)
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if is_literal(atom) else known[atom]

    for equation in jaxpr.eqns:
        outputs = run(equation, [value(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, outputs, strict=True))
    # As arrays, though a literal is a plain number.
    outvars: Any = jaxpr.outvars
    return [
        jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else known[atom]
        for atom in outvars
    ]


def bind(
    equation: Equation, inputs: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Return the outputs of an equation as it is written, or with other parameters."""
    params = equation.params if params is None else params
    bound: Any = equation.primitive.get_bind_params(params)
    # Up to JAX 0.9.0 with the functions among the parameters apart.
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)
    outputs = equation.primitive.bind(*functions, *inputs, **bound)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


@contextlib.contextmanager
def placed_as(equation: Equation) -> Iterator[None]:
    """Trace what is inside where, named and configured as the equation is."""
    source = equation.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    context = source_info_util.user_context(source.traceback, name_stack=names)
    with context, equation.ctx.manager:
        yield


def rebind(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation as it is written, where it is written."""
    with placed_as(equation):
        return bind(equation, inputs)


def bind_with(
    equation: Equation, inputs: Sequence[Any], inner: Sequence[ClosedJaxpr]
) -> list[Any]:
    """Return the outputs of an equation with other jaxprs inside, all else the same."""
    params, inputs, rest = dict(equation.params), list(inputs), iter(inner)
    for name in _INNER:
        old = params.get(name)
        if isinstance(old, tuple):
            params[name] = tuple(next(rest) for _ in old)
        elif isinstance(old, ClosedJaxpr):
            params[name] = next(rest)
        elif isinstance(old, Jaxpr):
            new = next(rest)
            params[name] = _with_consts_as_inputs(new) if new.consts else new.jaxpr
            inputs = [*new.consts, *inputs]
    return bind(equation, inputs, params)


def _with_consts_as_inputs(closed: ClosedJaxpr) -> Jaxpr:
    consts = closed.jaxpr.constvars

    def run(*args: Any) -> list[Any]:
        filled = ClosedJaxpr(closed.jaxpr, args[: len(consts)])
        return evaluate(filled, args[len(consts) :], rebind)

    return traced(run, [var.aval for var in (*consts, *closed.jaxpr.invars)]).jaxpr


def traced(function: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of a function of arrays, as one that goes inside an equation."""
    with source_info_util.reset_name_stack():
        return jax.make_jaxpr(function)(*avals)


def shard_mapped(equation: Equation, function: Callable[..., Any]) -> Any:
    """Return `function` mapped as this shard_map maps its jaxpr."""
    params = equation.params
    if "in_specs" in params:
        axes = params.get("newly_manual_axes") or params.get("manual_axes")
        return jax.shard_map(
            function,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=set(axes),
        )
    # Up to JAX 0.6. Imported here, for later versions warn of it.
    from jax.experimental.shard_map import shard_map

    def specs(names: Sequence[Any], atoms: Sequence[Any]) -> list[PartitionSpec]:
        return [
            PartitionSpec(*(axes.get(i) for i in range(atom.aval.ndim)))
            for axes, atom in zip(names, atoms, strict=True)
        ]

    return shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(specs(params["in_names"], equation.invars)),
        out_specs=specs(params["out_names"], equation.outvars),
        **{name: params[name] for name in ("check_rep", "auto")},
    )
