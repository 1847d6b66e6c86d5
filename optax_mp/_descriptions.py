"""Where the arrays of an optimizer state are: with their params, also as descriptions.

An `init` that is called with `jax.ShapeDtypeStruct`s describes its state in this way,
with the shardings that it will have.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._boxes import Divides
from optax_mp._jax._arrays import (
    is_traced_by_jit,
    sharding_in_type,
    spec_in_type,
    varies_by_rank,
)
from optax_mp._jax._explicit import asked_shardings, fits_blocks, reshard_like
from optax_mp._jax._memory import HOST_KIND, is_host_type, is_on_host
from optax_mp._jax._place_like import place_like
from optax_mp._states import find_owners
from optax_mp._tree import PyTree, ends_in, is_array


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
            # A sharding in a type needs no hint: XLA has to follow it.
            place = place_like if sharding_in_type(like) is None else reshard_like
            leaves[i] = place(leaves[i], like)
    return treedef.unflatten(leaves)


def _can_follow(leaf: Any, param: Any) -> bool:
    """Return whether `leaf` can and should be sharded like `param`."""
    # Only under `jit`: under `vmap` the param would add its batch axis to the leaf.
    if not (is_traced_by_jit(leaf) and is_traced_by_jit(param)):
        return False
    if is_on_host(leaf):
        return False  # placed already, by `offload`
    if not ends_in(leaf, param.shape):
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


Init = Callable[[PyTree], PyTree]


def takes_descriptions(init: Init) -> Any:
    """Return an `init` that describes the state if the params are descriptions."""

    @functools.wraps(init)
    def init_fn(params: PyTree) -> PyTree:
        leaves = jax.tree.leaves(params)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return describe_state(init, params)
        return init(params)

    return init_fn


def describe_state(init: Init, params: PyTree) -> PyTree:
    """Return descriptions of the state that `init` makes.

    An array of the state is sharded as its param is, where that has a `NamedSharding`,
    or as `init` asks for. What belongs to no param is replicated on that mesh.
    """
    leaves, treedef = jax.tree.flatten(params)
    at = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def init_arrays(arrays: Sequence[jax.Array]) -> PyTree:
        filled = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            filled[i] = array
        return init(treedef.unflatten(filled))

    trace = jax.make_jaxpr(init_arrays, return_shape=True)
    closed, state = trace([leaves[i] for i in at])
    shardings = _shardings(closed, state, params)
    described, treedef = jax.tree.flatten(state)
    for i, sharding in enumerate(shardings):
        if sharding is not None:
            described[i] = described[i].update(sharding=sharding)
    return treedef.unflatten(described)


def _shardings(closed: Any, state: PyTree, params: PyTree) -> list[Any]:
    """Return the sharding of each leaf of a described state; None if not known."""
    owners, arrays = find_owners(state, params), jax.tree.leaves(params)
    of_params = [_named_sharding(x) for x in arrays]
    asked = asked_shardings(closed)
    named = [x for x in (*of_params, *asked) if x is not None]
    if not named:
        return [None] * len(owners)
    whole = NamedSharding(named[0].mesh, PartitionSpec())
    shardings = []
    for i, leaf in enumerate(jax.tree.leaves(state)):
        own = whole
        owner = owners[i]
        if owner is not None and (of_owner := of_params[owner]) is not None:
            own = follow(of_owner, arrays[owner].shape, leaf.shape)
        if asked[i] is not None:
            own = NamedSharding(asked[i].mesh, fill_spec(asked[i].spec, own.spec))
        on_host = is_host_type(closed.out_avals[i])
        shardings.append(own.with_memory_kind(HOST_KIND) if on_host else own)
    return shardings


def follow(
    sharding: NamedSharding, param: tuple[int, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Return how an array of the state of a param is sharded.

    It is sharded as the param is along each axis that divides, such as those of block
    scales, and not along axes in front of those. An array with fewer axes is whole.
    """
    more = len(shape) - len(param)
    spec: list[Any] = [None] * len(shape)
    if more >= 0:
        spec = [None] * more + [*sharding.spec, *[None] * len(param)][: len(param)]
    own = sharding.update(spec=PartitionSpec(*spec))
    fits = [fits_blocks(own, axis, size, 1) for axis, size in enumerate(shape)]
    spec = [entry if fit else None for entry, fit in zip(spec, fits, strict=True)]
    return sharding.update(spec=PartitionSpec(*spec))


def fill_spec(spec: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
    """Return a spec with the entries of another where it is unconstrained."""
    pairs = zip(spec, (*other, *[None] * len(spec)), strict=False)
    unknown = PartitionSpec.UNCONSTRAINED
    return PartitionSpec(*(b if a is unknown else a for a, b in pairs))


def _named_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
