"""Where arrays are on devices: those of an optimizer's state with their params."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_flatten_with_path

from optax_mp._jax._arrays import is_traced_by_jit, spec_in_type, varies
from optax_mp._states import owners
from optax_mp._tree import PyTree


def place_like_params(state: PyTree, params: PyTree) -> PyTree:
    """Return `state` with its arrays on the devices where their params are.

    Under `jit` zeros depend on nothing, so XLA would put a whole moment on every
    device, however the params are sharded. Outside `jit` JAX places zeros like the
    param that they are made for.
    """
    paths_and_params = tree_flatten_with_path(params)[0]
    paths = [path for path, _ in paths_and_params]
    arrays = [param for _, param in paths_and_params]
    leaves, treedef = jax.tree.flatten(state)
    for i, owner in enumerate(owners(state, paths, arrays)):
        if owner is not None and _can_follow(leaves[i], arrays[owner]):
            leaves[i] = place_like(leaves[i], arrays[owner])
    return treedef.unflatten(leaves)


def _can_follow(leaf: Any, param: Any) -> bool:
    # Only under `jit`: a param under `vmap` would give a batch axis to what has none.
    if not (is_traced_by_jit(leaf) and is_traced_by_jit(param)):
        return False
    if leaf.shape[max(0, leaf.ndim - param.ndim) :] != param.shape:
        return False  # neither of the param's shape, nor many of that
    is_number = jnp.issubdtype(leaf.dtype, jnp.number)
    # With explicit sharding zeros are made where their param is, and are not moved.
    has_same_spec = spec_in_type(leaf) == spec_in_type(param)
    return is_number and param.ndim > 0 and has_same_spec and not varies(param)


# `depending_outputs` knows by the name of this jit, `PLACE_LIKE`, that its output does
# not depend on `param`.
@jax.jit
def place_like(leaf: jax.Array, param: jax.Array) -> jax.Array:
    """Return `leaf`, made to depend on `param` as far as sharding is concerned.

    XLA propagates the sharding of `param` to the select before it simplifies it away.
    """
    always = jnp.broadcast_to((param == param) | (param != param), leaf.shape)
    return lax.select(always, leaf, jnp.zeros_like(leaf))
