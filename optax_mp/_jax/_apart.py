"""Calls that XLA compiles apart from what is around them."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

Function = Callable[..., list[Any]]


def can_call_apart() -> bool:
    """Return whether JAX can tell XLA to leave a call as it is: from 0.7 on."""
    return "x" in inspect.signature(set_xla_metadata).parameters


def apart(function: Function) -> Function:
    """Return a function that XLA does not inline where it is called.

    So nothing is fused with what is around a call, and what it needs for itself is free
    after it. Only XLA for CPUs is known to do so; it may be ignored.

    Args:
        function: takes arrays, and returns one or more.
    """
    jitted = jax.jit(function)
    if not can_call_apart():
        return jitted

    def call(*args: Any) -> list[Any]:
        # The attribute of a result becomes one of the operation that made it.
        first, *others = jitted(*args)
        return [set_xla_metadata(first, inlineable="false"), *others]

    return call
