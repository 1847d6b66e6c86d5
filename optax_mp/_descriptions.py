"""Optimizer states described by `jax.ShapeDtypeStruct`, with their shardings."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._jax._explicit import fits_blocks
from optax_mp._jax._memory import HOST_KIND, is_host_type
from optax_mp._jax._placed import asked_shardings
from optax_mp._states import find_owners
from optax_mp._tree import PyTree, is_array

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
    known = [x for x in (*of_params, *asked) if x is not None]
    if not known:
        return [None] * len(owners)
    whole = NamedSharding(known[0].mesh, PartitionSpec())
    shardings = []
    for i, leaf in enumerate(jax.tree.leaves(state)):
        own = whole
        owner = owners[i]
        if owner is not None and (of_owner := of_params[owner]) is not None:
            own = follow(of_owner, arrays[owner].shape, leaf.shape)
        own = _combine(asked[i], own)
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


def _combine(asked: Any, own: NamedSharding) -> NamedSharding:
    """Return what `init` asks for; along axes of which it says nothing, as before."""
    if asked is None:
        return own
    before = [*own.spec, *[None] * len(asked.spec)]
    unknown = PartitionSpec.UNCONSTRAINED
    spec = [b if a is unknown else a for a, b in zip(asked.spec, before, strict=False)]
    return NamedSharding(asked.mesh, PartitionSpec(*spec))


def _named_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
