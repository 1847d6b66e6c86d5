"""Where arrays lie on devices: those of an optimizer's state with their params."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_flatten_with_path

from optax_mp._jax._arrays import is_traced_by_jit, spec_in_type, varies
from optax_mp._states import owners
from optax_mp._tree import PyTree


def laid_as_params(state: PyTree, params: PyTree) -> PyTree:
    """Return `state`, whose arrays lie where the params of their shapes do.

    Under `jit` zeros depend on nothing: XLA would put all of a moment on every device,
    whatever is sharded. Outside of it JAX makes them like the param that they are
    zeros of.
    """
    paths_and_params = tree_flatten_with_path(params)[0]
    paths = [path for path, _ in paths_and_params]
    arrays = [param for _, param in paths_and_params]
    leaves, treedef = jax.tree.flatten(state)
    for i, owner in enumerate(owners(state, paths, arrays)):
        if owner is not None and _can_follow(leaves[i], arrays[owner]):
            leaves[i] = laid_as(leaves[i], arrays[owner])
    return treedef.unflatten(leaves)


def _can_follow(leaf: Any, param: Any) -> bool:
    # By jit alone: a param under vmap would make a batch of what has none.
    if not (is_traced_by_jit(leaf) and is_traced_by_jit(param)):
        return False
    if leaf.shape[max(0, leaf.ndim - param.ndim) :] != param.shape:
        return False  # neither of the param's shape, nor many of that
    is_number = jnp.issubdtype(leaf.dtype, jnp.number)
    # With explicit shardings zeros are made where their param is; nor are they moved.
    same_type = spec_in_type(leaf) == spec_in_type(param)
    return is_number and param.ndim > 0 and same_type and not varies(param)


# Who reads a jaxpr knows by the name, `LAID_AS`, that the output does not depend on the
# param.
@jax.jit
def laid_as(leaf: jax.Array, param: jax.Array) -> jax.Array:
    """Return `leaf`, which XLA takes for dependent on `param` until it is sharded."""
    always = jnp.broadcast_to((param == param) | (param != param), leaf.shape)
    return lax.select(always, leaf, jnp.zeros_like(leaf))
