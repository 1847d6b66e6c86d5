"""Put the arrays of an optimizer state on the devices of their params."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike

from optax_mp._boxes import Divides
from optax_mp._jax._arrays import is_traced_by_jit, spec_in_type, varies_by_rank
from optax_mp._jax._memory import is_on_host
from optax_mp._states import find_owners
from optax_mp._tree import PyTree


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
            leaves[i] = shard_alike(leaves[i], like)[0]
    return treedef.unflatten(leaves)


def _can_follow(leaf: Any, param: Any) -> bool:
    """Return whether `leaf` can and should be sharded like `param`."""
    # Only under `jit`: under `vmap` the param would add its batch axis to the leaf.
    if not (is_traced_by_jit(leaf) and is_traced_by_jit(param)):
        return False
    if is_on_host(leaf):
        return False  # placed already, by `offload`
    if leaf.shape[max(0, leaf.ndim - param.ndim) :] != param.shape:
        return False  # neither the param's shape, nor a stack of such arrays
    is_number = jnp.issubdtype(leaf.dtype, jnp.number)
    # With explicit sharding zeros already have the sharding of their param.
    has_same_spec = spec_in_type(leaf) == spec_in_type(param)
    return is_number and param.ndim > 0 and has_same_spec and not varies_by_rank(param)


def divides_names(box: Any) -> Divides:
    """Return a test of whether an axis of a box divides over the devices of its name.

    If no mesh is known, or a name is no mesh axis but one that rules translate, it has
    to divide over all devices.
    """
    mesh = getattr(box, "mesh", None) or jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)

    def divides(names: Any, length: int) -> bool:
        names = (names,) if isinstance(names, str) else names
        if all(name in sizes for name in names):
            return length % math.prod(sizes[name] for name in names) == 0
        return (
            length % (math.prod(sizes.values()) if sizes else jax.device_count()) == 0
        )

    return divides
