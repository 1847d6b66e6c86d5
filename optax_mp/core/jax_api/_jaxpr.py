"""Trace a call to a jaxpr, and run a jaxpr equation by equation."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp.core.jax_api import _extend
from optax_mp.core.jax_api._arrays import is_array

AnyJaxpr = _extend.Jaxpr | _extend.ClosedJaxpr
Equation = Any  # a JaxprEqn, whose variables JAX types without dtype and shape
Run = Callable[[Equation, list[Any]], Sequence[Any]]


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[_extend.Jaxpr, Sequence[Any]]:
    """Return a jaxpr and its constants."""
    # From JAX 0.12 on there is one class, and a jaxpr has its constants itself.
    opened: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return opened, getattr(jaxpr, "consts", ())


def is_literal(atom: Any) -> bool:
    """Return whether an input is a number written into the jaxpr."""
    return isinstance(atom, _extend.Literal)


def bind(
    equation: Equation, inputs: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Return the outputs of an equation as written, or with other parameters."""
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
                x.val if isinstance(x, _extend.Literal) else values[x]
                for x in equation.invars
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
    outer = _extend.source_info_util.current_name_stack()
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
        return _extend.source_info_util.user_context(source.traceback, name_stack=names)

    with contextlib.ExitStack() as configured:
        yield located


def is_dynamic(leaf: Any) -> bool:
    """Return whether a leaf is an array that a jaxpr can compute with.

    A `ShapeDtypeStruct` and an array of strings have a shape and a dtype, but are not.
    """
    if isinstance(leaf, _extend.Tracer):
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
        outputs: the leaves that the function returned. In the place of an array there
            is an object with its shape and dtype, and `is_output` is true for it.
        treedef: the structure of what the function returned.
    """

    closed: Any
    arrays: list[Any]
    places: list[int]
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
        return cls(closed, arrays, places, outputs, treedef)

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


class _Output(jax.ShapeDtypeStruct):
    """Stands for an array among the outputs."""


def is_output(leaf: Any) -> bool:
    """Return whether a leaf of `TracedCall.outputs` stands for an array."""
    return isinstance(leaf, _Output)
