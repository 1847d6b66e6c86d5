"""Shard optimizer state like its params; abstract (ShapeDtypeStruct) states.

An `init` that is called with `jax.ShapeDtypeStruct`s describes its state in this way,
with the shardings that it will have.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._contact import is_traced_by_jit, varying_axes
from optax_mp.core.jax_api._jaxpr import TracedCall
from optax_mp.core.jax_api._shardings import asked_shardings
from optax_mp.core.trees import _tree
from optax_mp.core.trees._states import find_owners


def place_like_params(state: _tree.PyTree, params: _tree.PyTree) -> _tree.PyTree:
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
            leaves[i] = _arrays.place_like(leaves[i], like)
    return treedef.unflatten(leaves)


def _can_follow(leaf: Any, param: Any) -> bool:
    """Return whether `leaf` can and should be sharded like `param`."""
    # Only under `jit`: under `vmap` the param would add its batch axis to the leaf.
    is_in_jit = is_traced_by_jit(leaf) and is_traced_by_jit(param)
    # `offload` has placed an array in host memory already.
    if (
        not is_in_jit
        or _arrays.is_on_host(leaf)
        or not _tree.ends_in(leaf, param.shape)
    ):
        return False
    is_number = jnp.issubdtype(leaf.dtype, jnp.number)
    # With explicit sharding zeros already have the sharding of their param.
    has_same_spec = _arrays.spec_in_type(leaf) == _arrays.spec_in_type(param)
    return is_number and param.ndim > 0 and has_same_spec and not varying_axes(param)


Init = Callable[[_tree.PyTree], _tree.PyTree]


def init_or_describe(init: Init, params: _tree.PyTree) -> _tree.PyTree:
    """Return the state, or descriptions of it if the params are descriptions."""
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return describe_state(init, params)
    return init(params)


def describe_state(init: Init, params: _tree.PyTree) -> _tree.PyTree:
    """Return descriptions of the state that `init` makes.

    An array of the state is sharded as its param is, where that has a `NamedSharding`,
    or as `init` asks for. Arrays that belong to no param are replicated on that mesh.
    """
    # Counts may be plain numbers.
    call = TracedCall.of(
        lambda x: jax.tree.map(jnp.asarray, init(x)), params, _arrays.is_array
    )
    described = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.closed.out_avals]
    arrays = jax.tree.leaves(params)
    owners = find_owners(call.unflatten(described), params)
    of_params, asked = list(map(named_sharding, arrays)), asked_shardings(call.closed)
    named = [x for x in (*of_params, *asked) if x is not None]
    for i, owner in enumerate(owners if named else ()):
        own = NamedSharding(named[0].mesh, PartitionSpec())
        if owner is not None and (of_owner := of_params[owner]) is not None:
            own = follow_sharding(of_owner, arrays[owner].shape, described[i].shape)
        if asked[i] is not None:
            own = NamedSharding(asked[i].mesh, fill_spec(asked[i].spec, own.spec))
        if _arrays.is_host_type(call.closed.out_avals[i]):
            own = own.with_memory_kind(_arrays.HOST_KIND)
        described[i] = described[i].update(sharding=own)
    return call.unflatten(described)


def follow_sharding(
    sharding: NamedSharding, param: tuple[int, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Return how an array of the state of a param is sharded.

    Its last axes are those of the param. Each is sharded as the param's axis is, if its
    own length divides among the devices: it may be shorter, as an axis of scales is.
    Axes in front of these are not sharded. An array with fewer axes is whole.

    Args:
        sharding: the sharding of the param.
        param: the shape of the param.
        shape: the shape of the array.
    """
    if shape == param:
        return sharding
    more = len(shape) - len(param)
    entries = (
        [None] * more + _arrays.entries_of(sharding.spec, len(param))
        if more >= 0
        else []
    )
    own = sharding.update(spec=PartitionSpec(*entries))
    fits = [
        _arrays.fits_groups(own, axis, shape[axis], 1) for axis in range(len(entries))
    ]
    kept = [x if fit else None for x, fit in zip(entries, fits, strict=True)]
    return sharding.update(spec=PartitionSpec(*kept))


def fill_spec(spec: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
    """Return a spec with the entries of another where it is unconstrained.

    An entry that names a mesh axis which the spec itself uses is left out: there the
    array is not sharded.
    """
    given = {name for dim in range(len(spec)) for name in _arrays.axis_names(spec, dim)}
    entries = list(spec)
    for dim, entry in enumerate(_arrays.entries_of(other, len(spec))):
        if entries[dim] is PartitionSpec.UNCONSTRAINED:
            is_free = given.isdisjoint(_arrays.axis_names(other, dim))
            entries[dim] = entry if is_free else None
    return PartitionSpec(*entries)


def named_sharding(leaf: Any) -> NamedSharding | None:
    """Return the sharding of an array, or of a description, if it is on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
