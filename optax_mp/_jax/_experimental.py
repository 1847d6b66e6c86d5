"""The door to `jax.experimental`: its modules are imported when they are first used.

They are slow to import, and move from one version of JAX to the next.

Functions that are `outlined` need it: XLA for CPUs must not inline them. It computes
each result of a program in a separate loop, and what several of these read once in
each. Within a function that it does not inline, it computes that once.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax

from optax_mp._jax._jaxpr import Equation, bind


def experimental(name: str) -> Any:
    """Return a module of `jax.experimental`."""
    return import_module(f"jax.experimental.{name}")


def with_major_to_minor(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Return an array whose axes lie in memory in this order, the last one densely."""
    layout = experimental("layout")
    return layout.with_layout_constraint(x, layout.Layout(order))


# It ends the name of a call: an equation says no more of the function that it calls.
_MARK = "_outlined"


def outlined(*static_argnums: int) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function to be jitted, and computed apart from its callers on a CPU.

    Args:
        *static_argnums: as of `jax.jit`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        function.__name__ += _MARK
        return jax.jit(function, static_argnums=static_argnums)

    return decorate


def is_outlined(equation: Equation) -> bool:
    """Return whether an equation is a call of a function that is `outlined`."""
    return equation.params.get("name", "").endswith(_MARK)


def bind_outlined(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a call that XLA does not inline."""
    with outlined_here():
        return bind(equation, inputs)


def outlined_here() -> Any:
    """Return a context where XLA inlines no call."""
    return experimental("xla_metadata").set_xla_metadata(inlineable="false")
