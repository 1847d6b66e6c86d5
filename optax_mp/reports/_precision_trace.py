"""A function and its gradient as a jaxpr, without running it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from optax_mp._jax._jaxpr import ClosedJaxpr
from optax_mp._jax._source import is_transposed
from optax_mp._jax._traced import is_dynamic
from optax_mp._tree import is_inexact
from optax_mp.autocast._changes import pure_call
from optax_mp.reports._precision_walk import any_equation

Argnums = int | Sequence[int] | None
_FORWARD_ONLY = "for the forward pass alone pass argnums=()."


class _Input(NamedTuple):
    """An array among the arguments: which argument, how to write it, and the array."""

    position: int
    name: str
    value: Any


class _Call:
    """A call whose arrays are inputs, and all else is as it is."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Read the arguments of `fun(*args, **kwargs)`."""
        self.fun, self._bound = fun, _bind(fun, args, kwargs)
        self.leaves, self._treedef = tree_flatten_with_path(
            tuple(self._bound.arguments.values())
        )
        self.inputs = [self._input(*leaf) for leaf in self.leaves if _is_input(leaf[1])]

    def _input(self, path: Any, value: Any) -> _Input:
        position, name = path[0].idx, list(self._bound.arguments)[path[0].idx]
        kind = self._bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            position += path[1].idx
        return _Input(position, f"{name}{keystr(path[1:])}", value)

    def run(self, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return what the function returns for these arrays, and all arrays of that.

        A Flax NNX module changes in place: a training step may return nothing at all.
        """
        rest = iter(arrays)
        filled = [next(rest) if _is_input(x) else x for _, x in self.leaves]
        values = self._treedef.unflatten(filled)
        self._bound.arguments.update(zip(self._bound.arguments, values, strict=True))
        call = pure_call(self.fun, self._bound.args, self._bound.kwargs)
        outputs, changes = call.fun(*call.args)
        return outputs, _arrays((outputs, changes))


def trace(
    fun: Callable[..., Any], args: Any, kwargs: Any, argnums: Argnums
) -> tuple[list[str], ClosedJaxpr]:
    """Trace a function, with its gradient if it has one.

    Args:
        fun: the function.
        args: its arguments; arrays may be `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
        argnums: as in `precision_report`.

    Returns:
        The name of each input of the jaxpr, such as `params['w']`, and the jaxpr.
    """
    call = _Call(fun, args, kwargs)
    chosen = _choose(call, argnums)
    names, values = [x.name for x in call.inputs], [x.value for x in call.inputs]
    at = [i for i, x in enumerate(call.inputs) if x.position in chosen]
    at = [i for i in at if is_inexact(values[i])]
    if argnums is None or not at:
        forward = _trace_forward(call, values)
        if not at or _computes_gradient(forward, [values[i].shape for i in at]):
            return names, forward
    try:
        return names, jax.make_jaxpr(lambda x: _run_with_gradient(call, at, x))(values)
    except Exception as error:
        # If it is the function that does not trace, this raises what JAX says of that.
        _trace_forward(call, values)
        raise ValueError(
            "precision_report: `fun` cannot be differentiated with respect to "
            f"{', '.join(names[i] for i in at)}, expected a function that `jax.grad` "
            f"takes; name other arguments by `argnums`, or {_FORWARD_ONLY} JAX says: "
            f"{error}"
        ) from error


def _trace_forward(call: _Call, values: list[Any]) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(lambda x: call.run(x)[1])(values)
    except TypeError as error:
        if "carry output must have equal types" not in str(error):
            raise
        raise TypeError(
            "precision_report: a loop in `fun` returns its carry in another dtype than "
            "it takes, as a scan over layers of bfloat16 params with float32 norms "
            "does, expected the same dtype; run `optax_mp.amp` over float32, as in "
            "`amp(lambda *args: fun(*cast_floating(args, jnp.float32)))`, set the "
            "`dtype` of the layers to bfloat16 where they cast back, or cast the carry "
            f"back. JAX says: {error}"
        ) from error


def _run_with_gradient(call: _Call, at: list[int], inputs: list[Any]) -> list[Any]:
    """Return what a call returns, and the gradients of some inputs."""

    def run(some: list[Any]) -> tuple[list[Any], list[Any]]:
        replaced = dict(zip(at, some, strict=True))
        outputs, arrays = call.run([replaced.get(i, x) for i, x in enumerate(inputs)])
        return _differentiated(outputs), arrays

    outputs, pull, arrays = jax.vjp(run, [inputs[i] for i in at], has_aux=True)
    ones = [jax.lax.full_like(x, 1) for x in outputs]
    return arrays + list(pull(ones)[0])


def _computes_gradient(traced: ClosedJaxpr, shapes: list[tuple[int, ...]]) -> bool:
    """Return whether a function is a training step, or returns gradients.

    Such a function has a backward pass inside. So has a loss of a gradient, but it
    returns one number, which is no gradient unless that is of one number, too.
    """
    is_number = [aval.shape for aval in traced.out_avals] == [()] != shapes
    return any_equation(traced, is_transposed) and not is_number


def _arrays(outputs: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(outputs) if is_dynamic(x)]


def _differentiated(outputs: Any) -> list[Any]:
    """Return the outputs to differentiate: a loss, or else all that are floating."""
    if isinstance(outputs, tuple) and len(outputs) > 1:
        first = outputs[0]
        if is_dynamic(first) and is_inexact(first) and not first.shape:
            return [first]  # What comes with a loss is auxiliary.
    return list(filter(is_inexact, _arrays(outputs)))


def _choose(call: _Call, argnums: Argnums) -> list[int]:
    """Return the positions of the arguments to differentiate."""
    floating = {x.position: x for x in call.inputs if is_inexact(x.value)}
    if argnums is None:
        return list(floating)[:1]
    count = len(call.leaves) and call.leaves[-1][0][0].idx + 1
    chosen = [argnums] if isinstance(argnums, int) else argnums
    positions = [x if x >= 0 else x + count for x in chosen]
    if set(positions) - set(floating):
        names = [f"{i} ({x.name.split('[')[0]})" for i, x in floating.items()]
        raise ValueError(
            f"precision_report: `argnums` is {argnums}, expected arguments with "
            f"floating arrays: {', '.join(names) or 'there are none'}; {_FORWARD_ONLY}"
        )
    return positions


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_dynamic(leaf)


def _bind(fun: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Return arguments by their names, or by numbers if there is no signature."""
    try:
        return inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # A call that does not fit fails by itself.
        anything = inspect.signature(lambda *args, **kwargs: None)
        return anything.bind(*args, **kwargs)
