"""Shard optimizer state like its params; abstract (ShapeDtypeStruct) states.

An `init` that is called with `jax.ShapeDtypeStruct`s describes its state in this way,
with the shardings that it will have.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from optax_mp._jax._arrays import (
    HOST_KIND,
    axis_names,
    entries_of,
    fits_groups,
    is_host_type,
    is_on_host,
    place_like,
    spec_in_type,
)
from optax_mp._jax._contact import is_traced_by_jit, varying_axes
from optax_mp._jax._dataflow import asked_shardings
from optax_mp._jax._jaxpr import TracedCall
from optax_mp.trees._boxes import Divides
from optax_mp.trees._states import find_owners
from optax_mp.trees._tree import PyTree, ends_in, is_array, spread_prefix


def place_like_params(state: PyTree, params: PyTree) -> PyTree:
    """Return `state` with each array sharded like its param.

    Under `jit` zeros depend on nothing, so XLA would put a whole moment on every
    device, however the params are sharded. Outside `jit`, `jnp.zeros_like` already
    follows the param.
    """
    arrays = jax.tree.leaves(params)
    leaves, treedef = jax.tree.flatten(state)
    for i, owner in enumerate(find_owners(state, params)):
        if owner is not None and _can_follow(leaves[i], arrays[owner]):
            like = jnp.broadcast_to(arrays[owner], leaves[i].shape)
            leaves[i] = place_like(leaves[i], like)
    return treedef.unflatten(leaves)


def _can_follow(leaf: Any, param: Any) -> bool:
    """Return whether `leaf` can and should be sharded like `param`."""
    # Only under `jit`: under `vmap` the param would add its batch axis to the leaf.
    is_in_jit = is_traced_by_jit(leaf) and is_traced_by_jit(param)
    # `offload` has placed an array in host memory already.
    if not is_in_jit or is_on_host(leaf) or not ends_in(leaf, param.shape):
        return False
    is_number = jnp.issubdtype(leaf.dtype, jnp.number)
    # With explicit sharding zeros already have the sharding of their param.
    has_same_spec = spec_in_type(leaf) == spec_in_type(param)
    return is_number and param.ndim > 0 and has_same_spec and not varying_axes(param)


def divides_names(box: Any) -> Divides:
    """Return a test of whether an axis of a box divides over the devices of its name.

    If no mesh is known, or a name is no mesh axis but one that rules translate, it has
    to divide over all devices.
    """
    mesh = getattr(box, "mesh", None) or jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)

    def divides(names: Any, length: int) -> bool:
        names = (names,) if isinstance(names, str) else names
        if not sizes:  # not before, because it starts the backend
            return length % jax.device_count() == 0
        axes = names if all(name in sizes for name in names) else sizes
        return length % math.prod(sizes[name] for name in axes) == 0

    return divides


Init = Callable[[PyTree], PyTree]


def init_or_describe(init: Init, params: PyTree) -> PyTree:
    """Return the state, or descriptions of it if the params are descriptions."""
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return describe_state(init, params)
    return init(params)


def describe_state(init: Init, params: PyTree) -> PyTree:
    """Return descriptions of the state that `init` makes.

    An array of the state is sharded as its param is, where that has a `NamedSharding`,
    or as `init` asks for. Arrays that belong to no param are replicated on that mesh.
    """
    # Counts may be plain numbers.
    call = TracedCall.of(lambda x: jax.tree.map(jnp.asarray, init(x)), params, is_array)
    described = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.closed.out_avals]
    arrays = jax.tree.leaves(params)
    owners = find_owners(call.unflatten(described), params)
    of_params, asked = list(map(named_sharding, arrays)), asked_shardings(call.closed)
    named = [x for x in (*of_params, *asked) if x is not None]
    for i, owner in enumerate(owners if named else ()):
        own = NamedSharding(named[0].mesh, PartitionSpec())
        if owner is not None and (of_owner := of_params[owner]) is not None:
            own = follow(of_owner, arrays[owner].shape, described[i].shape)
        if asked[i] is not None:
            own = NamedSharding(asked[i].mesh, fill_spec(asked[i].spec, own.spec))
        if is_host_type(call.closed.out_avals[i]):
            own = own.with_memory_kind(HOST_KIND)
        described[i] = described[i].update(sharding=own)
    return call.unflatten(described)


def follow(
    sharding: NamedSharding, param: tuple[int, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Return how an array of the state of a param is sharded.

    It is sharded as the param is along each axis that divides, such as axes of block
    scales, and not along axes in front of these. An array with fewer axes is whole.
    """
    if shape == param:
        return sharding
    more = len(shape) - len(param)
    entries = [None] * more + entries_of(sharding.spec, len(param)) if more >= 0 else []
    own = sharding.update(spec=PartitionSpec(*entries))
    fits = [fits_groups(own, axis, shape[axis], 1) for axis in range(len(entries))]
    kept = [x if fit else None for x, fit in zip(entries, fits, strict=True)]
    return sharding.update(spec=PartitionSpec(*kept))


def fill_spec(spec: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
    """Return a spec with the entries of another where it is unconstrained.

    But for those that name an axis of the mesh that the spec gives to a dimension.
    """
    given = {name for dim in range(len(spec)) for name in axis_names(spec, dim)}
    entries = list(spec)
    for dim, entry in enumerate(entries_of(other, len(spec))):
        if entries[dim] is PartitionSpec.UNCONSTRAINED:
            is_free = given.isdisjoint(axis_names(other, dim))
            entries[dim] = entry if is_free else None
    return PartitionSpec(*entries)


def named_sharding(leaf: Any) -> NamedSharding | None:
    """Return the sharding of an array, or of a description, if it is on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def spread_shardings(
    params: Any, shardings: Any, caller: str
) -> list[NamedSharding | None]:
    """Return the sharding of each param, None where a mesh is not known.

    Args:
        params: the params.
        shardings: a tree of shardings like these, or a prefix of one.
        caller: the public function that the user called, for error messages.
    """
    leaves = spread_prefix(params, shardings, f"{caller}: `param_shardings`")
    for leaf in leaves:
        if not isinstance(leaf, Sharding):
            raise TypeError(
                f"{caller}: expected `param_shardings` to hold shardings, got {leaf!r};"
                " pass `jax.tree.map(lambda p: p.sharding, params)`."
            )
    return [leaf if isinstance(leaf, NamedSharding) else None for leaf in leaves]
