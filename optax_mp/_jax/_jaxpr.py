"""Read, run and trace jaxprs.

Versions of JAX differ here, and in `_control_flow`, which knows equations with jaxprs
inside.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.extend.core import primitives as _primitives

AnyJaxpr = Jaxpr | ClosedJaxpr
Equation = Any  # a JaxprEqn, whose variables JAX types without dtype and shape
Run = Callable[[Equation, list[Any]], Sequence[Any]]


def jaxprs_within(equation: Equation) -> list[AnyJaxpr]:
    """Return all jaxprs among the parameters of an equation, whatever their use."""
    groups = [
        x if isinstance(x, tuple | list) else (x,) for x in equation.params.values()
    ]
    return [x for x in chain(*groups) if isinstance(x, Jaxpr | ClosedJaxpr)]


def any_equation(jaxpr: AnyJaxpr, test: Callable[[Equation], bool]) -> bool:
    """Return whether a test is true of an equation of a jaxpr, at any depth."""
    return any(
        test(equation) or any(any_equation(x, test) for x in jaxprs_within(equation))
        for equation in open_jaxpr(jaxpr)[0].eqns
    )


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Return a jaxpr and its constants."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def is_literal(atom: Any) -> bool:
    """Return whether an input is a number written into the jaxpr."""
    return isinstance(atom, Literal)


def is_always(value: Any, test: Callable[[np.ndarray], Any]) -> bool:
    """Return whether all entries of a literal or a constant pass a test."""
    try:
        return bool(np.all(test(np.asarray(value))))
    except TypeError:  # no number, such as a random key, or a traced value
        return False


def is_shaped(aval: Any) -> bool:
    """Return whether an abstract value is a plain array: no token and no reference."""
    return isinstance(aval, ShapedArray)


def with_dtype(aval: Any, dtype: Any) -> Any:
    """Return an abstract value with another dtype and all else as it was."""
    # If the dtype is the same, as of a random key, so is the weak type.
    return aval if aval.dtype == dtype else aval.update(dtype=dtype, weak_type=False)


def primitive_names() -> set[str]:
    """Return the names of all public primitives of JAX."""
    values = vars(_primitives).values()
    return {value.name for value in values if isinstance(value, Primitive)}


def bind(
    equation: Equation, inputs: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Return the outputs of an equation as it is written, or with other parameters."""
    params = equation.params if params is None else params
    bound: Any = equation.primitive.get_bind_params(params)
    # Up to JAX 0.9.0, the functions among the parameters come apart.
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)
    outputs = equation.primitive.bind(*functions, *inputs, **bound)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def evaluate(jaxpr: AnyJaxpr, args: Sequence[Any], run: Run = bind) -> list[Any]:
    """Return the outputs of `jaxpr` for `args`.

    Args:
        jaxpr: the jaxpr.
        args: the values of its inputs.
        run: returns the outputs of an equation, from the equation and its inputs.
    """
    jaxpr, consts = open_jaxpr(jaxpr)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    run_equations([(x, x.invars, x.outvars) for x in jaxpr.eqns], values, run)
    # A literal is a plain number, but the outputs are arrays.
    outvars: Any = jaxpr.outvars
    return [
        jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else values[atom]
        for atom in outvars
    ]


def run_equations(
    equations: Iterable[tuple[Equation, Sequence[Any], Sequence[Any]]],
    values: MutableMapping[Any, Any],
    run: Run = bind,
) -> None:
    """Evaluate equations, in order; add their outputs to `values`.

    Each runs with its own named scopes, source line and configuration.

    Args:
        equations: each with its inputs, which are literals or keys of `values`, and the
            keys of its outputs.
        values: what is known.
        run: returns the outputs of an equation, from the equation and its inputs.
    """
    with Location() as location:
        for equation, atoms, outputs in equations:
            # Not in a function: this runs for every equation of every traced step.
            inputs = [
                atom.val if isinstance(atom, Literal) else values[atom]
                for atom in atoms
            ]
            with location.of(equation):
                made = run(equation, inputs)
            values.update(zip(outputs, made, strict=True))


def groups_with_common(members: Sequence[Iterable[Hashable]]) -> list[list[int]]:
    """Return groups of indices: sets with a common member are in one group."""
    groups: dict[int, list[int]] = {}
    all_of: dict[int, set[Hashable]] = {}
    group_of: dict[Hashable, int] = {}
    for i, own in enumerate(members):
        places, together = [i], set(own)
        for group in sorted({group_of[x] for x in together if x in group_of}):
            places += groups.pop(group)
            together |= all_of.pop(group)
        groups[i], all_of[i] = sorted(places), together
        group_of.update(dict.fromkeys(together, i))
    return list(groups.values())


class Location:
    """The named scopes, source line and configuration of one equation after another.

    Entering all of JAX's contexts for each equation takes a fifth of the time of
    tracing. So the configuration, which hardly ever changes, stays entered from one
    equation to the next, and the names are joined once per scope.
    """

    def __init__(self) -> None:
        self._outer = source_info_util.current_name_stack()
        self._configured = contextlib.ExitStack()
        self._configuration: Any = None
        self._inner: Any = None
        self._names: Any = None

    def __enter__(self) -> "Location":
        return self

    def __exit__(self, *error: Any) -> None:
        self._configured.__exit__(*error)

    def of(self, equation: Equation) -> Any:
        """Return a context with the names and the source line of an equation."""
        if equation.ctx is not self._configuration:
            self._configured.close()
            self._configured.enter_context(equation.ctx.manager)
            self._configuration = equation.ctx
        source = equation.source_info
        if source.name_stack is not self._inner:
            self._inner = source.name_stack
            self._names = self._outer + self._inner
        return source_info_util.user_context(source.traceback, name_stack=self._names)


def trace_jaxpr(function: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of a function of arrays, to be put inside an equation.

    Its named scopes start empty, because the equation's are put before them.
    """
    with source_info_util.reset_name_stack():
        return jax.make_jaxpr(function)(*avals)


def cache_by_jaxpr(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a cache, keyed by a jaxpr and further arguments.

    An entry lives only as long as its jaxpr, which may hold arrays: `functools.cache`
    would never free them.
    """
    cache: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def cached(jaxpr: Any, *args: Any) -> Any:
        results = cache.setdefault(jaxpr, {})
        if args not in results:
            results[args] = function(jaxpr, *args)
        return results[args]

    return cached


def live_equations(jaxpr: Jaxpr) -> list[Equation]:
    """Return the equations whose results are used, as only those are compiled."""
    used, live = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(map(id, equation.outvars)):
            live.append(equation)
            used.update(map(id, equation.invars))
    return live[::-1]
