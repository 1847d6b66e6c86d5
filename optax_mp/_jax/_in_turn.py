"""Tell XLA for CPUs what to compute first, by a number that it has to wait for."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._apart import apart, can_call_apart
from optax_mp._jax._by_platform import by_platform

_LARGE = 2**17


def done_with(x: jax.Array) -> jax.Array:
    """Return 0. In a program for one CPU it is computed after `x`.

    Args:
        x: an array that the program writes anyway. It has elements.
    """

    def at_once(x: jax.Array) -> list[jax.Array]:
        return [jnp.int32(0)]

    def in_turn(device_count: int, x: jax.Array) -> list[jax.Array]:
        # Apart, or XLA would compute one element of `x` again, without the others.
        return apart(_zero)(x) if device_count == 1 else at_once(x)

    if not can_call_apart():
        return jnp.int32(0)
    return by_platform(at_once, {}, {"cpu": in_turn}, x)[0]


def after(done: jax.Array, integers: Sequence[jax.Array]) -> list[jax.Array]:
    """Return arrays. In a program for one CPU, what reads them waits for `done`."""

    def at_once(done: jax.Array, *integers: jax.Array) -> list[jax.Array]:
        return list(integers)

    def in_turn(device_count: int, done: jax.Array, *integers: jax.Array) -> list[Any]:
        return [x + done.astype(x.dtype) for x in integers]

    return by_platform(at_once, {}, {"cpu": in_turn}, done, *integers)


def _zero(x: jax.Array) -> list[jax.Array]:
    """Return 0, in a way that XLA does not see."""
    first = jnp.real(x[(0,) * x.ndim]).astype(jnp.int32)
    half = lax.shift_right_logical(first, 16)
    return [lax.max(half, jnp.int32(_LARGE)) - _LARGE]
