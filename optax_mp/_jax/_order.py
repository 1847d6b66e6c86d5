"""Tell XLA for CPUs what to compute first, by a number that it has to wait for."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._apart import apart, can_call_apart
from optax_mp._jax._by_platform import by_platform


def hidden_zeros(x: jax.Array) -> jax.Array:
    """Return int32 zeros in the shape of `x`, which XLA does not know to be zeros.

    Args:
        x: integers of less than 2^17, in any dtype.
    """
    beyond = jnp.int32(2**17)
    return lax.max(x.astype(jnp.int32), beyond) - beyond


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
    """Return `integers` unchanged. On one CPU, what reads them waits for `done`."""

    def at_once(done: jax.Array, *integers: jax.Array) -> list[jax.Array]:
        return list(integers)

    def in_turn(device_count: int, done: jax.Array, *integers: jax.Array) -> list[Any]:
        return [x + done.astype(x.dtype) for x in integers]

    return by_platform(at_once, {}, {"cpu": in_turn}, done, *integers)


def _zero(x: jax.Array) -> list[jax.Array]:
    first = jnp.real(x[(0,) * x.ndim]).astype(jnp.int32)
    return [hidden_zeros(lax.shift_right_logical(first, jnp.int32(16)))]
