"""Put the arrays of an optimizer state on the devices of their params."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_flatten_with_path

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
    paths_and_params = tree_flatten_with_path(params)[0]
    paths = [path for path, _ in paths_and_params]
    arrays = [param for _, param in paths_and_params]
    leaves, treedef = jax.tree.flatten(state)
    for i, owner in enumerate(find_owners(state, paths, arrays)):
        if owner is not None and _can_follow(leaves[i], arrays[owner]):
            leaves[i] = place_like(leaves[i], arrays[owner])
    return treedef.unflatten(leaves)


def _can_follow(leaf: Any, param: Any) -> bool:
    """Return whether `place_like` can and should shard `leaf` like `param`."""
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


# `depending_outputs` recognises this jit by its name and file: its output does not
# depend on `param`.
@jax.jit
def place_like(leaf: jax.Array, param: jax.Array) -> jax.Array:
    """Return `leaf`, sharded like `param`.

    The select always takes `leaf`. XLA propagates the sharding of `param` to it before
    it simplifies the select away.
    """
    always = jnp.broadcast_to((param == param) | (param != param), leaf.shape)
    return lax.select(always, leaf, jnp.zeros_like(leaf))
