"""The door to `jax.experimental`: its modules are imported when they are first used.

They are slow to import, and move from one version of JAX to the next.
"""

from importlib import import_module
from typing import Any

import jax


def experimental(name: str) -> Any:
    """Return a module of `jax.experimental`."""
    return import_module(f"jax.experimental.{name}")


def with_major_to_minor(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Return an array whose axes lie in memory in this order, the last one densely."""
    layout = experimental("layout")
    return layout.with_layout_constraint(x, layout.Layout(order))
