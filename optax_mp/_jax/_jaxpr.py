"""Read, run and trace jaxprs.

Versions of JAX differ here, and in `_control_flow`, which knows equations with jaxprs
inside.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.extend.core import primitives as _primitives

from optax_mp._jax._arrays import is_array
from optax_mp._jax._contact import is_carry_error

AnyJaxpr = Jaxpr | ClosedJaxpr
Equation = Any  # a JaxprEqn, whose variables JAX types without dtype and shape
Run = Callable[[Equation, list[Any]], Sequence[Any]]


def jaxprs_within(equation: Equation) -> list[AnyJaxpr]:
    """Return all jaxprs among the parameters of an equation, whatever their use."""
    params = equation.params.values()
    groups = [x if isinstance(x, tuple | list) else (x,) for x in params]
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

    Each equation runs with its own named scopes, source line and configuration.

    Args:
        jaxpr: the jaxpr.
        args: the values of its inputs.
        run: returns the outputs of an equation, from the equation and its inputs.
    """
    jaxpr, consts = open_jaxpr(jaxpr)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    with locations() as located:
        for equation in jaxpr.eqns:
            # Not in a function: this runs for every equation of every traced step.
            inputs = [
                x.val if isinstance(x, Literal) else values[x] for x in equation.invars
            ]
            with located(equation):
                made = run(equation, inputs)
            values.update(zip(equation.outvars, made, strict=True))
    # A literal is a plain number, but the outputs are arrays.
    outvars: Any = jaxpr.outvars
    return [
        jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else values[atom]
        for atom in outvars
    ]


@contextlib.contextmanager
def locations() -> Iterator[Callable[[Equation], Any]]:
    """Yield a function from an equation to a context with its names and source line.

    Entering all of JAX's contexts for each equation takes a fifth of the time of
    tracing. So the configuration, which hardly ever changes, stays entered from one
    equation to the next, and the names are joined once per scope.
    """
    outer = source_info_util.current_name_stack()
    configuration = inner = names = None

    def located(equation: Equation) -> Any:
        nonlocal configuration, inner, names
        if equation.ctx is not configuration:
            configured.close()
            configured.enter_context(equation.ctx.manager)
            configuration = equation.ctx
        source = equation.source_info
        if source.name_stack is not inner:
            inner = source.name_stack
            names = outer + inner
        return source_info_util.user_context(source.traceback, name_stack=names)

    with contextlib.ExitStack() as configured:
        yield located


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


def is_dynamic(leaf: Any) -> bool:
    """Return whether a leaf is an array that a jaxpr can compute with.

    A `ShapeDtypeStruct` is not, nor is an array of strings, although they have a shape
    and a dtype.
    """
    if isinstance(leaf, Tracer):
        return True
    if not is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return leaf.dtype != jax.dtypes.float0


@dataclass(frozen=True)
class TracedCall:
    """A traced call. Leaves that are not arrays pass through it unchanged.

    Attributes:
        closed: the jaxpr, from the arrays among the inputs to those among the outputs.
        arrays: the arrays among the inputs.
        places: the indices of these among the leaves of the argument.
        leaf_count: how many leaves the argument has.
        outputs: the leaves that the function returned. In the place of an array there
            is an object with its shape and dtype, and `is_output` is true for it.
        treedef: the structure of what the function returned.
    """

    closed: Any
    arrays: list[Any]
    places: list[int]
    leaf_count: int
    outputs: list[Any]
    treedef: Any

    @classmethod
    def of(
        cls,
        function: Callable[[Any], Any],
        argument: Any,
        is_input: Callable[[Any], bool] = is_dynamic,
        jit_name: str | None = None,
    ) -> "TracedCall":
        """Trace `function(argument)`.

        Args:
            function: the function.
            argument: its only argument.
            is_input: which leaves are inputs of the jaxpr; by default, all arrays.
            jit_name: the name of a call of `jit` around the function; None for no call.
        """
        leaves, argument_def = jax.tree.flatten(argument)
        places = [i for i, leaf in enumerate(leaves) if is_input(leaf)]
        outputs: list[Any] = []
        treedef: Any = None

        def flat_function(arrays: list[Any]) -> list[Any]:
            nonlocal outputs, treedef
            given = dict(zip(places, arrays, strict=True))
            filled = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            made, treedef = jax.tree.flatten(function(argument_def.unflatten(filled)))
            # Not the tracers themselves: they must not outlive the trace.
            outputs = [_Output(x.shape, x.dtype) if is_dynamic(x) else x for x in made]
            pairs = zip(made, outputs, strict=True)
            return [x for x, output in pairs if isinstance(output, _Output)]

        traced: Any = flat_function
        if jit_name is not None:
            flat_function.__name__ = flat_function.__qualname__ = jit_name
            traced = jax.jit(flat_function)
        # Only NumPy arrays: a mutable reference (`jax.Ref`) must not become an array.
        arrays = [
            jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
            for x in (leaves[i] for i in places)
        ]
        closed = jax.make_jaxpr(traced)(arrays)
        return cls(closed, arrays, places, len(leaves), outputs, treedef)

    def run(self) -> Any:
        """Return what the function returned, computed as one program of `jit`."""
        # All inputs are kept: they say on which devices, if they are sharded by type.
        run = jax.jit(lambda arrays: evaluate(self.closed, arrays), keep_unused=True)
        return self.unflatten(run(self.arrays))

    def unflatten(self, values: Sequence[Any]) -> Any:
        """Return what the function returned, with `values` for its arrays."""
        arrays = iter(values)
        leaves = [next(arrays) if isinstance(x, _Output) else x for x in self.outputs]
        return self.treedef.unflatten(leaves)

    def unflatten_outputs(self) -> Any:
        """Return what the function returned, with descriptions of its arrays."""
        return self.treedef.unflatten(self.outputs)


@contextlib.contextmanager
def explain_carry_error(caller: str) -> Iterator[None]:
    """Raise another error for JAX's on a loop whose carry changes its dtype."""
    try:
        yield
    except TypeError as error:
        message = str(error)
        # Unless it was explained within.
        if "JAX says" not in message and is_carry_error(error):
            raise TypeError(
                f"{caller}: expected each loop in `fun` to return its carry in the "
                "dtype that it takes, got another, as from a scan over layers of "
                "bfloat16 params with float32 norms; run `optax_mp.amp` over float32, "
                "as in `amp(lambda *args: fun(*cast_floating(args, jnp.float32)))`, "
                "set the `dtype` of the layers to bfloat16, or cast the carry back. "
                f"JAX says: {message}"
            ) from error
        raise


class _Output(jax.ShapeDtypeStruct):
    """Stands for an array among the outputs."""


def is_output(leaf: Any) -> bool:
    """Return whether a leaf of `TracedCall.outputs` stands for an array."""
    return isinstance(leaf, _Output)
