"""A function and its backward pass as jaxprs, without running it."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_mp._jax._jaxpr import ClosedJaxpr, trace_jaxpr
from optax_mp._jax._traced import is_dynamic
from optax_mp._tree import describe, is_inexact
from optax_mp.amp._changes import pure_call
from optax_mp.reports._precision_walk import has_backward_pass

Argnums = int | Sequence[int] | None
_Path = tuple[Any, ...]


@dataclass(frozen=True)
class Trace:
    """The jaxprs of a function.

    Attributes:
        paths: the path of each input of `forward`, such as `params['w']`.
        forward: the jaxpr of the function. If there is a backward pass, it returns
            what that reads, too, after the function's own outputs.
        output_count: how many outputs come before those for the backward pass.
        backward: the jaxpr of the backward pass: of what `forward` keeps for it, and
            the gradients of some outputs. None without a backward pass.
        gradient_paths: the paths of these outputs.
    """

    paths: list[str]
    forward: ClosedJaxpr
    output_count: int
    backward: ClosedJaxpr | None = None
    gradient_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Call:
    """A call whose arrays are inputs, and all else is as it is.

    Attributes:
        fun: the function.
        leaves: paths and leaves of `(args, kwargs)`.
        treedef: their structure.
        names: the names of the positional arguments.
    """

    fun: Callable[..., Any]
    leaves: list[tuple[_Path, Any]]
    treedef: Any
    names: list[str]

    @classmethod
    def of(cls, fun: Callable[..., Any], args: Any, kwargs: Any) -> "_Call":
        leaves, treedef = tree_flatten_with_path((args, kwargs))
        return cls(fun, leaves, treedef, _argument_names(fun, len(args)))

    def inputs(self) -> list[tuple[_Path, Any]]:
        """Return paths and values of the arrays."""
        return [(path, leaf) for path, leaf in self.leaves if _is_input(leaf)]

    def run(self, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """Return what the function returns for these arrays, and what it changes.

        A Flax NNX module changes in place: a training step may return nothing at all.
        """
        rest = iter(arrays)
        filled = [next(rest) if _is_input(x) else x for _, x in self.leaves]
        args, kwargs = self.treedef.unflatten(filled)
        call = pure_call(self.fun, args, kwargs)
        return call.fun(*call.args)

    def spell(self, path: _Path) -> str:
        """Return a path as one would write it, such as `params['w']`."""
        return f"{self.name_of(_argument(path))}{keystr(path[2:])}"

    def name_of(self, argument: int | str) -> str:
        """Return the name of a positional argument, or of one that has a name."""
        return argument if isinstance(argument, str) else self.names[argument]


def trace(fun: Callable[..., Any], args: Any, kwargs: Any, argnums: Argnums) -> Trace:
    """Trace a function, and its backward pass if it has one.

    Args:
        fun: the function.
        args: its arguments; arrays may be `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
        argnums: as in `precision_report`.
    """
    call = _Call.of(fun, args, kwargs)
    chosen = _chosen_arguments(call, argnums)
    at = [
        i
        for i, (path, x) in enumerate(call.inputs())
        if _argument(path) in chosen and is_inexact(x)
    ]
    if not at:
        return _trace_forward(call)
    if argnums is None:
        forward = _trace_forward(call)
        if _computes_gradient(call, forward, at):
            return forward
    try:
        return _trace_both(call, at)
    except Exception as error:
        # If it is the function that does not trace, this raises what JAX says of that.
        _trace_forward(call)
        names = ", ".join(call.name_of(each) for each in chosen)
        error.add_note(
            "precision_report: raised while differentiating `fun` with respect to "
            f"{names}; for the forward pass alone give argnums=()."
        )
        raise


def _trace_forward(call: _Call) -> Trace:
    """Trace a function without a backward pass."""
    try:
        forward = jax.make_jaxpr(lambda x: [y for _, y in _arrays(call.run(x))])(
            [x for _, x in call.inputs()]
        )
    except Exception as error:
        error.add_note("precision_report: raised while tracing `fun`.")
        raise
    paths = [call.spell(path) for path, _ in call.inputs()]
    return Trace(paths, forward, len(forward.out_avals))


def _trace_both(call: _Call, at: list[int]) -> Trace:
    """Trace a function, with what it keeps for the backward pass, and that pass.

    Args:
        call: the function.
        at: the inputs to differentiate.
    """
    pullback: Any = None
    gradient_paths: list[str] = []

    def forward(inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        nonlocal pullback, gradient_paths

        def of_some(some: list[Any]) -> tuple[list[Any], list[Any]]:
            nonlocal gradient_paths
            filled = list(inputs)
            for i, x in zip(at, some, strict=True):
                filled[i] = x
            outputs, changes = call.run(filled)
            found = _arrays(outputs)
            differentiated = _differentiated(outputs, found)
            gradient_paths = [keystr(path) for path, _ in differentiated]
            returned = [*found, *_arrays(changes)]
            return [x for _, x in differentiated], [x for _, x in returned]

        graded, pull, outputs = jax.vjp(of_some, [inputs[i] for i in at], has_aux=True)
        # The function that jax.vjp returns is a pytree of the arrays that it keeps.
        kept, pullback = jax.tree.flatten(pull)
        return outputs, graded, kept

    inputs = [x for _, x in call.inputs()]
    whole, shapes = jax.make_jaxpr(forward, return_shape=True)(inputs)
    output_count, graded_count = len(shapes[0]), len(shapes[1])
    graded = whole.out_avals[output_count : output_count + graded_count]
    kept = whole.out_avals[output_count + graded_count :]

    def backward(*given: Any) -> Any:
        return pullback.unflatten(given[: len(kept)])(list(given[len(kept) :]))

    return Trace(
        [call.spell(path) for path, _ in call.inputs()],
        whole,
        output_count + graded_count,
        trace_jaxpr(backward, [*kept, *graded]) if graded else None,
        tuple(gradient_paths),
    )


def _computes_gradient(call: _Call, traced: Trace, at: list[int]) -> bool:
    """Return whether a function is a training step, or returns gradients.

    Such a function has a backward pass inside. So has a loss of a gradient, but it
    returns one number, which is no gradient unless that is of one number, too.
    """
    if not has_backward_pass(traced.forward):
        return False
    inputs = call.inputs()
    given = [inputs[i][1].shape for i in at]
    returned = [aval.shape for aval in traced.forward.out_avals]
    return returned != [()] or given == [()]


def _arrays(outputs: Any) -> list[tuple[_Path, Any]]:
    """Return paths and values of the arrays that a function returned."""
    leaves = tree_flatten_with_path(outputs)[0]
    return [(path, x) for path, x in leaves if is_dynamic(x)]


def _differentiated(
    outputs: Any, arrays: list[tuple[_Path, Any]]
) -> list[tuple[_Path, Any]]:
    """Return the outputs to differentiate: a loss, or else all that are floating."""
    if isinstance(outputs, tuple) and len(outputs) > 1:
        first = outputs[0]
        if is_dynamic(first) and is_inexact(first) and not first.shape:
            return arrays[:1]  # What comes with a loss is auxiliary.
    return [(path, x) for path, x in arrays if is_inexact(x)]


def _chosen_arguments(call: _Call, argnums: Argnums) -> list[int | str]:
    """Return the arguments to differentiate, by position or name."""
    floating = [_argument(path) for path, x in call.inputs() if is_inexact(x)]
    if argnums is None:
        return floating[:1]
    chosen: list[int | str] = []
    for number in [argnums] if isinstance(argnums, int) else argnums:
        if not -len(call.names) <= number < len(call.names):
            raise ValueError(
                f"precision_report: `argnums` has {number}, expected the position of "
                f"one of {len(call.names)} arguments."
            )
        number %= len(call.names)
        if number not in floating:
            held = [
                describe(x) for path, x in call.inputs() if _argument(path) == number
            ]
            raise ValueError(
                f"precision_report: `argnums` has {number}, but {call.names[number]} "
                f"holds {', '.join(held) or 'no array'}, expected floating arrays to "
                "differentiate."
            )
        chosen.append(number)
    return chosen


def _argument(path: _Path) -> int | str:
    """Return the argument that a path leads into, by position or name."""
    return path[1].key if path[0].idx else path[1].idx


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_dynamic(leaf)


def _argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first arguments of a function."""
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # It has no signature.
        for parameter in inspect.signature(fun).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest = range(count - len(names))
                names += [f"{parameter.name}[{i}]" for i in rest]
                break
            names.append(parameter.name)
    return [*names, *(f"args[{i}]" for i in range(len(names), count))][:count]
