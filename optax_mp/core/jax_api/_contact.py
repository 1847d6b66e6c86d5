"""Facts about JAX beyond its public API. Each fact is tested at its first use.

A class that JAX does not export is learned from a tiny program, whatever its name. Code
that reads a name or a text is first tried on a tiny program. That takes a few
milliseconds, once in a process. If JAX has changed, one warning says what is off, and
what to do.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from optax_mp.core._warnings import warn

# Later versions of JAX say `manual_axis_type`, earlier ones `vma`.
_VARYING = "manual_axis_type", "vma"

FLOAT = jax.ShapeDtypeStruct((4,), "float32")
MESH = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

Ask = Callable[[Any], Any]


def tried(is_right: Callable[[Ask], Any], safe: Any, off: str) -> Callable[[Ask], Any]:
    """Decorate a function that asks JAX something: it is tried at its first call.

    Args:
        is_right: asks it about tiny programs, and returns whether the answers are true.
        safe: the answer to everything if they are not.
        off: what is off then, and what to do.
    """

    def decorate(ask: Ask) -> Any:
        @functools.cache
        def is_known() -> bool:
            why = "wrong answer"
            try:
                # In a thread, where no context, such as a mesh, is the caller's.
                with ThreadPoolExecutor(1) as thread:
                    if thread.submit(is_right, ask).result():
                        return True
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
            warn(
                f"optax_mp: JAX {jax.__version__} is not as `{ask.__name__}` expects "
                f"({why}), so {off}. Update optax_mp or use another JAX."
            )
            return False

        def answer(x: Any) -> Any:
            return ask(x) if is_known() else safe

        vars(answer)["is_known"] = is_known
        return functools.wraps(ask)(answer)

    return decorate


@functools.cache
def _class_in_jit() -> type:
    kinds: list[type] = []
    jax.eval_shape(lambda x: kinds.append(type(x)), FLOAT)
    return kinds[0]


def _about_arguments(ask: Ask) -> bool:
    found = []

    def note(x: Any) -> Any:
        found.append(ask(x))
        return x

    jax.eval_shape(note, FLOAT)
    jax.eval_shape(lambda x: jax.vmap(note)(x), FLOAT)
    jax.eval_shape(lambda x: jax.jvp(note, (x,), (x,)), FLOAT)
    return found == [True, False, False]


@tried(
    _about_arguments,
    False,
    "`release_gradients` fails, and `jax.jit(tx.init)` may put the state on every "
    "device: pass `out_shardings=state_shardings(tx, params)`",
)
def is_traced_by_jit(x: Any) -> bool:
    """Return whether `x` is traced by `jit` only, and not by `vmap` or `grad`."""
    return type(x) is _class_in_jit()


def _about_ranks(ask: Ask) -> bool:
    found = []

    def note() -> Any:
        found.extend(map(ask, (lax.axis_index("a"), jnp.zeros(()))))
        return jnp.zeros(1)

    spec = PartitionSpec("a")
    jax.eval_shape(jax.shard_map(note, mesh=MESH, in_specs=(), out_specs=spec))
    return found == [{"a"}, set()]


@tried(
    _about_ranks,
    frozenset(),
    "arrays in `shard_map` may be taken for equal on all devices: pass it "
    "`check_vma=False`",
)
def varying_axes(x: Any) -> frozenset[Any]:
    """Return the axes of shard_map that `x` differs over, by its type."""
    found = (getattr(getattr(x, "aval", None), name, None) for name in _VARYING)
    axes = next((axes for axes in found if axes is not None), ())
    return frozenset(getattr(axes, "varying", axes))
