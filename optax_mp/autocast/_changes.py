"""What a function changes in its arguments, of which amp traces copies.

A Flax NNX module changes in place: a BatchNorm replaces its statistics, a dropout
counts its random numbers. So that this reaches the caller's module, its state goes
through the trace by itself, and what changed is returned and written back, as `nnx.jit`
does. A change that cannot be written back raises a warning.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from optax_mp._tree import PyTree
from optax_mp._warnings import warn

Arrays = dict[Any, list[Any]]


class PureCall(NamedTuple):
    """A call that returns what it changes in the modules among its arguments.

    Attributes:
        fun: the function. It returns what it returned as written, and the changes.
        args: its arguments.
        write_back: takes the changes, and writes them to the caller's modules.
    """

    fun: Callable[..., tuple[Any, PyTree]]
    args: tuple[Any, ...]
    write_back: Callable[[PyTree], None]


def pure_call(fun: Callable[..., Any], args: Any, kwargs: Any) -> PureCall:
    """Return the call `fun(*args, **kwargs)`, which returns its changes, too."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
    modules = [leaf for leaf in leaves if _is_module(leaf)]
    graphdef, state = _nnx().split(modules) if modules else (None, {})
    others = [None if _is_module(leaf) else leaf for leaf in leaves]
    lost: set[str] = set()

    def pure(state: PyTree, others: list[Any]) -> tuple[Any, PyTree]:
        copies = _nnx().merge(graphdef, state) if modules else []
        rest, before = iter(copies), _arrays(copies)
        filled = (
            next(rest) if _is_module(leaf) else other
            for leaf, other in zip(leaves, others, strict=True)
        )
        args, kwargs = treedef.unflatten(filled)
        with _note_on_captured_modules():
            result = fun(*args, **kwargs)
        if modules and _lost_any(copies, graphdef, before):
            lost.update(type(x).__name__ for x in copies)
        return result, _changes(copies, before)

    def write_back(changes: PyTree) -> None:
        if changes:
            _nnx().update(modules, changes)
        if lost:
            _warn_of_lost(lost)

    return PureCall(pure, (state, others), write_back)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_module(x: Any) -> bool:
    # Without Flax imported, nothing is a module of it.
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def _variables(modules: list[Any]) -> dict[Any, Any]:
    """Return the variables of modules by their paths."""
    return dict(_nnx().to_flat_state(_nnx().state(modules))) if modules else {}


def _arrays(modules: list[Any]) -> Arrays:
    """Return the arrays of variables, which are replaced in place, by their paths."""
    return {path: jax.tree.leaves(x) for path, x in _variables(modules).items()}


def _changes(modules: list[Any], before: Arrays) -> PyTree:
    """Return the part of the state of modules that is new."""
    changed = [
        (path, variable)
        for path, variable in _variables(modules).items()
        if not _are_same(jax.tree.leaves(variable), before.get(path))
    ]
    return _nnx().from_flat_state(changed) if changed else {}


def _lost_any(modules: list[Any], graphdef: Any, before: Arrays) -> bool:
    """Return whether modules changed in a way that cannot be written back."""
    now = _variables(modules)
    if now.keys() - before.keys():
        # The graph differs, if only in these.
        return not before.keys() < now.keys()
    return _nnx().graphdef(modules) != graphdef


def _are_same(some: list[Any], others: list[Any] | None) -> bool:
    # Compared by identity: `==` would compare traced values.
    return others is not None and list(map(id, some)) == list(map(id, others))


@contextlib.contextmanager
def _note_on_captured_modules() -> Iterator[None]:
    """Say in Flax's error on changes from another trace how to avoid it."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                "amp: a module that changes in place must be an argument of the "
                "function that amp wraps, not a captured value."
            )
        raise


def _warn_of_lost(names: set[str]) -> None:
    warn(
        f"amp: the function changed its argument of class {', '.join(sorted(names))}, "
        "and the change is lost, because amp traces a copy, as jax.jit does; expected "
        "changes of the values of NNX Variables only; return what is to be kept, or "
        "change it outside of the function."
    )
