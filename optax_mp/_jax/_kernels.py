"""Where XLA ends a kernel, on a CPU.

XLA's kernels for CPUs have one output each. Where two outputs overwrite two inputs that
both are computed from (a param and its remainder), it copies the inputs first, for all
leaves at once; and memory that a program asks for anew costs more there than computing
on it. Here the values that both are read off are written out once, leaf after leaf, so
that one leaf's worth of memory serves all.

Nothing here changes a value.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._jax._arrays import is_traced_by_jit, varies
from optax_mp._tree import PyTree, is_array

_SMALL = 2**16  # Elements of a leaf that is not worth it.
_BEYOND_16_BITS = 2**17


class KernelEnds:
    """Ends of kernels one after the other, for the leaves of one tree."""

    def __init__(self) -> None:
        self._one: jax.Array | None = None

    def written_out(self, x: jax.Array, integers: jax.Array) -> jax.Array:
        """Return float32 `x`, as what XLA computes before anything that reads it.

        Args:
            x: values that more than one output is read off.
            integers: an array of that shape, of 8 or 16 bits.
        """
        if not _is_worth_it(x):
            return x
        # XLA computes a division again for nobody. This one is by one, as only we know.
        ones = (_zeros(integers) + 1).astype(jnp.float32)
        if self._one is not None:
            ones *= self._one
        return x / ones

    def then(self, integers: jax.Array) -> None:
        """Let what is written out next wait for an array of 8 or 16 bits."""
        if _is_worth_it(integers):
            first = integers[(0,) * integers.ndim]
            # A root is computed apart, where a plain number would be read too early.
            self._one = jnp.sqrt((_zeros(first) + 1).astype(jnp.float32))

    def after_all(self, state: PyTree) -> PyTree:
        """Return `state`, with its arrays of small integers written last of all.

        So what they were can be read until then, and need not be copied.
        """
        if self._one is None:
            return state
        zero = self._one - 1

        def waits(x: Any) -> Any:
            is_small = is_array(x) and jnp.issubdtype(x.dtype, jnp.integer)
            if not (is_small and x.dtype.itemsize <= 2 and _is_worth_it(x)):
                return x
            return x + zero.astype(x.dtype)

        return jax.tree.map(waits, state)


def _is_worth_it(x: jax.Array) -> bool:
    # With several devices, waiting would mean to ask the others. Of values that vmap or
    # shard_map tell apart, one must not come to depend on another.
    is_one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
    is_plain = is_traced_by_jit(x) and not varies(x)
    return is_one_cpu and is_plain and x.size >= _SMALL


def _zeros(integers: jax.Array) -> jax.Array:
    """Return zeros of which XLA does not know that they are."""
    return jnp.maximum(integers.astype(jnp.int32), _BEYOND_16_BITS) - _BEYOND_16_BITS
