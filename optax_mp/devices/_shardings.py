"""How optimizer states are sharded, and how `zero1` cuts an array over mesh axes."""

from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_mp.core.jax_api import _arrays
from optax_mp.core.trees import _tree
from optax_mp.core.trees._descriptions import describe_state, fill_spec
from optax_mp.core.wrappers._protocol import as_transformation

_CALLER = "state_shardings"


def state_shardings(
    tx: optax.GradientTransformation,
    params: optax.Params,
    shardings: _tree.PyTree = None,
) -> _tree.PyTree:
    """Return how the state of `tx` should be sharded, from the params' shardings.

    Each array is sharded as its param is. So an update needs no communication, except
    for the optimizer's own rule, such as a global norm. Scales are sharded like
    their codes, but not along an axis that does not divide. Arrays that belong to no
    param are replicated. The states of `zero1` and `offload` keep the placement that
    these choose.

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
        TypeError: if `tx` is not a transformation, or a sharding is not a
            `NamedSharding`.
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
    if shardings is None:
        shardings = jax.tree.map(lambda x: getattr(x, "sharding", None), params)
    spread = iter(_tree.spread_prefix(params, shardings, f"{_CALLER}: `shardings`"))

    def describe_param(path: Any, param: Any) -> Any:
        sharding = next(spread)
        if not _arrays.is_array(param):
            return param
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"{_CALLER}: expected a NamedSharding of param {_tree.spell(path)}, "
                f"which is {_arrays.describe(param)}, got {sharding}; pass "
                "`shardings`, as `NamedSharding(mesh, PartitionSpec())`."
            )
        return jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)

    described = jax.tree_util.tree_map_with_path(describe_param, params)
    return jax.tree.map(lambda x: x.sharding, describe_state(tx.init, described))


class ArrayCut(NamedTuple):
    """How an array is sharded before it is cut, and after.

    Attributes:
        whole: how the whole array is sharded; unconstrained along dimensions that are
            not cut.
        part: the same for the array that is cut.
    """

    whole: PartitionSpec
    part: PartitionSpec


def choose_cut(
    mesh: Mesh, axes: _arrays.MeshAxes, shape: tuple[int, ...], spec: PartitionSpec
) -> ArrayCut | None:
    """Return the cut over each mesh axis, along the first dimension that it divides.

    Args:
        mesh: the mesh.
        axes: the mesh axes to cut over.
        shape: the shape of the array.
        spec: how the array is sharded now.

    Returns:
        The cut; None if no dimension divides, or if the array is sharded over one of
        `axes` already.
    """
    whole: list[Any] = [_arrays.axis_names(spec, dim) for dim in range(len(shape))]
    # Sharded over data parallelism already (FSDP): there is nothing left to save.
    if any(name in names for names in whole for name in axes):
        return None
    part = list(whole)
    for name in axes:
        # The first dimension that divides, because its parts are contiguous.
        for dim, size in enumerate(shape):
            if size and size % _arrays.shard_count(mesh, (*part[dim], name)) == 0:
                part[dim] = (*part[dim], name)
                break
    if part == whole:
        return None
    for dim in range(len(shape)):
        # Dimensions that are not cut stay unchanged. With automatic sharding only
        # XLA knows how.
        if part[dim] == whole[dim]:
            whole[dim] = part[dim] = PartitionSpec.UNCONSTRAINED
    return ArrayCut(PartitionSpec(*(x or None for x in whole)), PartitionSpec(*part))


def shard(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Shard an array; a dimension that is unconstrained stays unchanged."""
    if mesh.explicit_axes:
        spec = fill_spec(spec, jax.typeof(x).sharding.spec)
    # An array that `offload` keeps in host memory stays there.
    kind = {"memory_kind": _arrays.HOST_KIND} if _arrays.is_on_host(x) else {}
    sharding = NamedSharding(mesh, spec, **kind)
    if mesh.explicit_axes:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def known_spec(param: jax.Array) -> PartitionSpec | None:
    """Return how a param is sharded, if the array or its type says it."""
    # A traced array has a spec only with explicit sharding.
    if not _arrays.is_traced(param):
        return getattr(getattr(param, "sharding", None), "spec", None)
    return (
        _arrays.spec_in_type(param)
        if _arrays.mesh_in_type(param).explicit_axes
        else None
    )
