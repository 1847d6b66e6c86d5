"""A function and its backward pass as jaxprs, without running it."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_mp._jax._jaxpr import ClosedJaxpr, evaluate, trace_jaxpr
from optax_mp._jax._traced import is_dynamic
from optax_mp._tree import describe, is_inexact
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
        output_count: how many outputs the function itself has.
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

    def run(self, arrays: Sequence[Any]) -> Any:
        """Return what the function returns for these arrays."""
        rest = iter(arrays)
        filled = [next(rest) if _is_input(x) else x for _, x in self.leaves]
        args, kwargs = self.treedef.unflatten(filled)
        return self.fun(*args, **kwargs)

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
    returned: list[tuple[str, bool]] = []

    def flat_function(arrays: list[Any]) -> list[Any]:
        outputs = call.run(arrays)
        found = [(k, x) for k, x in tree_flatten_with_path(outputs)[0] if is_dynamic(x)]
        graded = _are_differentiated(outputs, [x for _, x in found])
        paths = [keystr(path) for path, _ in found]
        returned.extend(zip(paths, graded, strict=True))
        return [x for _, x in found]

    with _note_in_errors("while tracing `fun`"):
        closed = jax.make_jaxpr(flat_function)([x for _, x in call.inputs()])
    paths = [call.spell(path) for path, _ in call.inputs()]
    at = [
        i
        for i, (path, x) in enumerate(call.inputs())
        if _argument(path) in chosen and is_inexact(x)
    ]
    outputs = [i for i, (_, yes) in enumerate(returned) if yes]
    whole = Trace(paths, closed, len(returned))
    if not at or not outputs or (argnums is None and has_backward_pass(closed)):
        return whole
    names = ", ".join(call.name_of(each) for each in chosen)
    with _note_in_errors(
        f"while differentiating `fun` with respect to {names}; for the forward pass "
        "alone give argnums=()"
    ):
        forward, backward = _differentiate(closed, at, outputs)
    gradient_paths = tuple(returned[i][0] for i in outputs)
    return Trace(paths, forward, len(returned), backward, gradient_paths)


def _differentiate(
    closed: ClosedJaxpr, at: list[int], outputs: list[int]
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Return the jaxprs of the forward pass, with what it keeps, and the backward.

    Args:
        closed: a function.
        at: the inputs to differentiate.
        outputs: the outputs to differentiate.
    """
    pullback: Any = None

    def forward(*inputs: Any) -> list[Any]:
        nonlocal pullback

        def of_some(some: list[Any]) -> tuple[list[Any], list[Any]]:
            filled = list(inputs)
            for i, x in zip(at, some, strict=True):
                filled[i] = x
            values = evaluate(closed, filled)
            return [values[i] for i in outputs], values

        some = [inputs[i] for i in at]
        _, pull, values = jax.vjp(of_some, some, has_aux=True)
        # The function that jax.vjp returns is a pytree of the arrays that it keeps.
        kept, pullback = jax.tree.flatten(pull)
        return [*values, *kept]

    whole = trace_jaxpr(forward, closed.in_avals)
    count = len(closed.out_avals)
    kept = whole.out_avals[count:]

    def backward(*given: Any) -> Any:
        return pullback.unflatten(given[: len(kept)])(list(given[len(kept) :]))

    gradients = [closed.out_avals[i] for i in outputs]
    return whole, trace_jaxpr(backward, [*kept, *gradients])


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


def _are_differentiated(outputs: Any, leaves: list[Any]) -> list[bool]:
    """Return which outputs are differentiated: a loss, or else all floating ones."""
    if isinstance(outputs, tuple) and len(outputs) > 1:
        first = outputs[0]
        if is_dynamic(first) and is_inexact(first) and not first.shape:
            # What comes with a loss is auxiliary.
            return [i == 0 for i in range(len(leaves))]
    return list(map(is_inexact, leaves))


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


@contextlib.contextmanager
def _note_in_errors(where: str) -> Iterator[None]:
    """Add to an error raised inside that it was raised by a report."""
    try:
        yield
    except Exception as error:
        error.add_note(f"precision_report: raised {where}.")
        raise
