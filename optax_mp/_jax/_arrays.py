"""Questions about one array: is it one, is it traced, what does its type say?"""

from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from optax_mp._jax._contact import varies_by_rank, varying_axes


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array (of JAX or NumPy, traced or not)."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def describe(leaf: Any) -> str:
    """Return dtype and shape of an array, such as `bfloat16[2,3]`; else its type."""
    if is_array(leaf):
        name = "float0" if leaf.dtype == jax.dtypes.float0 else leaf.dtype
        return f"{name}[{','.join(map(str, leaf.shape))}]"
    return type(leaf).__name__


def is_traced(x: Any) -> bool:
    """Return whether `x` is a tracer, which has no values."""
    return isinstance(x, Tracer)


def has_tracers(tree: Any) -> bool:
    """Return whether any leaf of a pytree is a tracer."""
    return any(map(is_traced, jax.tree.leaves(tree)))


def split_traced(args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the extra arguments of an update that are traced, and the others.

    Concrete values stay concrete: a rule may use them in an `if`.
    """
    traced = {name: x for name, x in args.items() if has_tracers(x)}
    return traced, {name: x for name, x in args.items() if name not in traced}


def compiles() -> bool:
    """Return whether `jit` compiles, which `jax.disable_jit` turns off."""
    return not getattr(jax.config, "jax_disable_jit", False)


def gather_equal(x: jax.Array, axis_name: Any, axis: int) -> jax.Array:
    """Gather along an axis; the type says that the result is equal on all ranks."""
    if not varying_axes(x):  # of pmap, vmap and shard_map without checks
        return lax.all_gather(x, axis_name, axis=axis, tiled=True)
    gather = getattr(lax, "all_gather_invariant", None)  # JAX 0.8
    if gather is not None:
        return gather(x, axis_name, axis=axis, tiled=True)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True, to="invarying")


def spec_in_type(x: Any) -> Any:
    """Return the `PartitionSpec` in the type of an array."""
    return jax.typeof(x).sharding.spec


def sharding_in_type(x: Any) -> NamedSharding | None:
    """Return the sharding in the type of an array, or None if it says nothing."""
    mesh = mesh_in_type(x)
    # Inside of shard_map the type has the sharding of the whole array.
    if not mesh.explicit_axes or varies_by_rank(x):
        return None
    # Types must name all axes that arrays are sharded over.
    hidden = [n for axis, n in mesh.shape.items() if axis not in mesh.explicit_axes]
    return jax.typeof(x).sharding if all(n == 1 for n in hidden) else None


def is_partitioned(x: Any) -> bool:
    """Return whether `x` is on several devices, and XLA decides what each computes."""
    mesh = mesh_in_type(x)
    return any(n > 1 and axis not in mesh.manual_axes for axis, n in mesh.shape.items())


def mesh_in_type(x: Any) -> Any:
    """Return the mesh in the type of an array. Over its explicit axes types shard."""
    return jax.typeof(x).sharding.mesh
