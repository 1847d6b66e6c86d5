"""The door to `jax.experimental`: its modules are imported when they are first used.

They are slow to import, and move from one version of JAX to the next.
"""

from importlib import import_module
from typing import Any


def experimental(name: str) -> Any:
    """Return a module of `jax.experimental`."""
    return import_module(f"jax.experimental.{name}")
