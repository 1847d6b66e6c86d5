"""Changes that a function makes to the Flax NNX modules among its arguments.

A module changes in place: a BatchNorm replaces its statistics, a dropout counts its
random numbers. amp traces a copy of the module. It returns the values of variables that
changed and writes them to the caller's module, as `nnx.jit` does. Other changes raise a
warning.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from optax_mp.core._warnings import warn
from optax_mp.core.trees._tree import PyTree


def check_function(fun: Any, caller: str) -> None:
    """Raise if `fun` cannot be called."""
    if not callable(fun):
        raise TypeError(
            f"{caller}: expected `fun` to be a function, got {fun!r}; pass it itself, "
            "not its result, and decorate by `functools.partial`."
        )


class PureCall(NamedTuple):
    """A call that returns what it changes in the modules among its arguments.

    Attributes:
        fun: the function; it returns the pair (result, changes).
        args: its positional arguments.
        write_back: takes the changes, and writes them to the caller's modules.
    """

    fun: Callable[..., tuple[Any, PyTree]]
    args: tuple[Any, ...]
    write_back: Callable[[PyTree], None]


def pure_call(fun: Callable[..., Any], args: Any, kwargs: Any, caller: str) -> PureCall:
    """Return the call `fun(*args, **kwargs)`, which also returns its changes."""
    check_function(fun, caller)
    nnx: Any = sys.modules.get("flax.nnx")
    kinds = (nnx.Pytree, nnx.Variable) if nnx else ()

    def is_module(x: Any) -> bool:
        return isinstance(x, kinds)

    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_module)
    modules = {i: leaf for i, leaf in enumerate(leaves) if is_module(leaf)}
    if not modules:
        return PureCall(lambda x, y: (fun(*x, **y), {}), (args, kwargs), lambda _: None)
    graphdef, state = nnx.split(modules)
    others = [None if i in modules else leaf for i, leaf in enumerate(leaves)]

    def pure(state: PyTree, others: list[Any]) -> tuple[Any, PyTree]:
        copies = nnx.merge(graphdef, state)
        before = _arrays(nnx, copies)
        args, kwargs = treedef.unflatten(
            copies.get(i, other) for i, other in enumerate(others)
        )
        result = fun(*args, **kwargs)
        after = _arrays(nnx, copies)
        # New variables also change the graph, but they can be written back.
        if after.keys() == before.keys() and nnx.graphdef(copies) != graphdef:
            names = ", ".join(sorted({type(x).__name__ for x in copies.values()}))
            warn(
                f"{caller}: expected the function to change only values of NNX "
                f"Variables, got another change of its argument of class {names}, "
                "which is lost; return it, or change it outside."
            )
        # By identity, because `==` would compare traced values.
        flat = nnx.to_flat_state(nnx.state(copies))
        changed = [
            (path, variable)
            for path, variable in flat
            if list(map(id, after[path])) != list(map(id, before.get(path, ())))
        ]
        return result, nnx.from_flat_state(changed)

    return PureCall(pure, (state, others), partial(nnx.update, modules))


def _arrays(nnx: Any, modules: Any) -> dict[Any, list[Any]]:
    """Return the arrays of each variable, by its path."""
    flat = nnx.to_flat_state(nnx.state(modules))
    return {path: jax.tree.leaves(variable) for path, variable in flat}
