"""state_shardings: how an optimizer's state should be sharded."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from optax_mp.trees._descriptions import describe_state
from optax_mp.trees._states import find_owners
from optax_mp.trees._tree import PyTree, describe, is_array, spell, spread_prefix
from optax_mp.wrappers._inner import as_transformation

_CALLER = "state_shardings"


def state_shardings(
    tx: optax.GradientTransformation, params: optax.Params, shardings: PyTree = None
) -> PyTree:
    """Return how the state of `tx` should be sharded, by how the params are.

    Each array is sharded as its param is. So an update needs no communication, except
    for the optimizer's own rule, such as a global norm. Block scales are sharded like
    their codes, but not along an axis that does not divide. Arrays that belong to no
    param are replicated. The states of `zero1` and `offload` are where those put them.

    A rule by shape, such as "the largest axis that divides", shards codes and their
    scales in different ways, and each step then moves them between devices. Use the
    rule for the params, and this function for the state.

    Args:
        tx: any optax optimizer, with or without transformations of this package.
        params: the params, or descriptions of them: only shapes and dtypes are read.
        shardings: a tree of `NamedSharding` like the params, or a prefix of one. By
            default the shardings of the params themselves.

    Returns:
        A tree of shardings like the state, for `out_shardings` of `jax.jit`, for
        `jax.device_put`, and for Orbax.

    Raises:
        TypeError: if `tx` is not a transformation, or a sharding is no `NamedSharding`.
        ValueError: if `shardings` does not fit the params.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> tx = optax_mp.mixed_precision(optax_mp.low_bit_state(optax.adamw(1e-3)))
        >>> params = {"w": jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)}
        >>> by_rows = NamedSharding(mesh, PartitionSpec("data", None))
        >>> shardings = optax_mp.state_shardings(tx, params, by_rows)
        >>> shardings.inner_state.inner_state[0].nu["w"].scales.spec[0]
        'data'
        >>> params = {"w": jnp.ones((512, 256), jnp.bfloat16)}
        >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
    """
    tx = as_transformation(tx, _CALLER, "tx")
    state = describe_state(tx.init, _describe_params(params, shardings))
    return jax.tree.map(lambda x: x.sharding, state)


def like_params(
    state: PyTree, params: PyTree, shardings: Sequence[NamedSharding | None]
) -> list[NamedSharding | None]:
    """Return the sharding of its param for each array of a state with its shape.

    Args:
        state: the state.
        params: the params.
        shardings: of the leaves of the params, None where not known; or empty.
    """
    if not shardings:
        return []
    values = jax.tree.leaves(params)
    both = zip(jax.tree.leaves(state), find_owners(state, params), strict=True)
    return [
        shardings[i] if i is not None and jnp.shape(x) == jnp.shape(values[i]) else None
        for x, i in both
    ]


def _describe_params(params: PyTree, shardings: PyTree) -> PyTree:
    """Return descriptions of the params, with their shardings."""
    if shardings is None:
        shardings = jax.tree.map(lambda x: getattr(x, "sharding", None), params)
    spread = spread_prefix(params, shardings, f"{_CALLER}: `shardings`")
    spread = jax.tree.structure(params).unflatten(spread)
    return jax.tree_util.tree_map_with_path(_describe, params, spread)


def _describe(path: Any, param: Any, sharding: Any) -> Any:
    if not is_array(param):
        return param
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{_CALLER}: expected the sharding of param {spell(path)}, which is "
            f"{describe(param)}, to be a NamedSharding, got {sharding!r}; pass "
            "`shardings`, such as `NamedSharding(mesh, PartitionSpec())`."
        )
    return jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)
