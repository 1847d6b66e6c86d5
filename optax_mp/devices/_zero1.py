"""zero1: an optimizer's state sharded over the axis of data parallelism."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_flatten_with_path

from optax_mp._dtypes import bits
from optax_mp._jax._arrays import has_explicit_axes, is_traced
from optax_mp._jax._jaxpr import evaluate
from optax_mp._jax._placement import laid_as_params, owners
from optax_mp._jax._traced import Traced, is_dynamic
from optax_mp._leaves import Leaves, is_absent
from optax_mp._transformation import as_transformation
from optax_mp._tree import PyTree, describe, is_floating, place

# The names of mesh axes over which one axis of an array is sharded.
Names = tuple[str, ...]


def zero1(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    *,
    param_specs: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Shard the state of `tx` over a mesh axis along which the params are replicated.

    Of N devices that hold the same params each keeps, and updates, 1/N of masters and
    moments. Then the params are gathered, in their own dtype: 2 bytes a weight where
    float32 updates would take 4.

    The results are those of `tx`. They are bit for bit the same for params with a
    master, where its rule works element by element. Where it adds up over a whole array
    (a norm, say), the sum is taken in another order; and float32 params that are their
    own master are a rounding off, since XLA contracts the last multiplication of a rule
    with the sum that follows, if nothing is gathered in between.

    The state is that of `tx`, laid out otherwise: `master_params`, `loss_scale`,
    checkpoints and `convert_opt_state` know no difference, and a run may go on with
    `zero1`, without it, or on another number of devices. Put it outermost: what stands
    around it has no part in the layout. Derivatives through `update` are zero.

    Each array is sharded along the first of its axes that N divides; one without such
    an axis stays as the params are, and so does what already is sharded over `axis`.
    Where N is more than any axis of an array bears, make two mesh axes of it and name
    both: they may then go along two axes of the array. `init`, under `jit` or outside,
    makes for each device its part alone.

    Where the axis of `low_bit_state`'s blocks is cut in parts that are no multiple of a
    block, codes are gathered at each step: choose a `block_size` that divides them.

    For use under `jit` with shardings, automatic or (rules that work element by
    element) explicit. Within `jax.shard_map` over `axis` every rank has its own state
    already.

    Args:
        tx: any optax optimizer, such as `dynamic_loss_scale(mixed_precision(adamw))`.
        mesh: the mesh on which the params are.
        axis: the name of the axis of data parallelism, or several.
        param_specs: how the params are sharded over other axes, so that both go
            together: a tree of `PartitionSpec` or shardings like the params, or a
            prefix of one. By default they are replicated.

    Returns:
        The transformation.

    Raises:
        TypeError: if `tx` is not a gradient transformation or `mesh` no mesh.
        ValueError: if the mesh has no such axis, or `param_specs` does not fit.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        >>> masters = optax_mp.mixed_precision(optax.adamw(1e-3))
        >>> tx = optax_mp.zero1(masters, mesh, "data")
        >>> state = tx.init(params)
        >>> shards = state.master_params["w"].addressable_shards
        >>> [s.data.size * jax.device_count() for s in shards[:1]]
        [4096]

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models, 2020, https://arxiv.org/abs/1910.02054
    """
    tx = as_transformation(tx, "zero1", "tx")
    axes = _checked_axes(mesh, axis)

    def parts_of(params: optax.Params) -> "_Parts":
        _check_not_manual(axes)
        leaves = Leaves.of(params, caller="zero1", name="`params`")
        return _Parts.of(leaves, mesh, axes, _declared(leaves.paths, param_specs))

    def init_fn(params: optax.Params) -> optax.OptState:
        parts = parts_of(params)
        # As one program, so that no device ever holds more than its part.
        traced = Traced.of(
            lambda given: parts.taken(laid_as_params(tx.init(given), given)), params
        )
        program = jax.jit(lambda arrays: evaluate(traced.closed, arrays))
        return traced.filled(program(traced.arrays))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ValueError(
                "zero1: `params` is None, expected the current params; call "
                "`tx.update(grads, state, params)`."
            )
        parts = parts_of(params)
        if extra_args.get("grad") is not None:
            extra_args["grad"] = parts.taken(extra_args["grad"])
        own = parts.taken(params)
        changes, state = tx.update(
            parts.taken(updates), parts.taken(state), own, **extra_args
        )
        return parts.gathered(own, changes), parts.taken(state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Part(NamedTuple):
    """How the parts of an array lie, axis by axis; None where that is left as it is.

    Attributes:
        whole: the mesh axes over which the whole array is sharded.
        part: those over which its parts are.
    """

    whole: tuple[Names | None, ...]
    part: tuple[Names | None, ...]


@dataclass(frozen=True)
class _Parts:
    """The parts of all params, and of all that belongs to them.

    Attributes:
        leaves: the params.
        mesh: of the devices.
        axes: the axes of data parallelism.
        parts: that of each param; None where it stays as it is.
    """

    leaves: Leaves
    mesh: Mesh
    axes: Names
    parts: list[_Part | None]

    @classmethod
    def of(
        cls, leaves: Leaves, mesh: Mesh, axes: Names, declared: list[PartitionSpec]
    ) -> "_Parts":
        parts: list[_Part | None] = []
        for path, param, spec in zip(
            leaves.paths, leaves.values, declared, strict=True
        ):
            parts.append(None)
            if not (is_dynamic(param) and is_floating(param)):
                continue
            _check_spec(spec, mesh, param, place(path))
            _check_placed(param, mesh, place(path))
            known = _known_spec(param)
            if known is not None and has_explicit_axes(mesh):
                spec = known
            parts[-1] = _chosen(mesh, axes, param.shape, spec)
            if known is None or parts[-1] == _chosen(mesh, axes, param.shape, known):
                continue
            raise ValueError(
                f"zero1: param {place(path)}, which is {describe(param)}, lies as "
                f"{known}, but `param_specs` says {spec}; without knowing how "
                "params are sharded, `update` under jit would move them. Give "
                "`param_specs=jax.tree.map(lambda p: p.sharding, params)`."
            )
        return cls(leaves, mesh, axes, parts)

    def taken(self, tree: PyTree) -> PyTree:
        """Return `tree`, of whose arrays that belong to params there are only parts."""
        values, treedef = jax.tree.flatten(tree)
        for i, owner in enumerate(owners(tree, self.leaves.paths)):
            part = self._part_of(values[i], owner)
            if part is not None:
                values[i] = _laid(values[i], self.mesh, part.part)
        return treedef.unflatten(values)

    def _part_of(self, x: Any, owner: int | None) -> _Part | None:
        """Return how the parts of an array lie that belongs to a param, or to none."""
        if not is_dynamic(x):
            return None
        if owner is not None:
            param, part = self.leaves.values[owner], self.parts[owner]
            if part is None:
                return None
            more = x.ndim - param.ndim
            if more >= 0 and x.shape[more:] == param.shape:
                # Of the param's own shape, or many of that.
                return _Part(*((None,) * more + names for names in part))
            if more == 0:
                # Scales of blocks, say: cut as the param is, or not at all. Cut
                # otherwise they would be gathered where they meet it.
                follows = _divides(self.mesh, part.part, x.shape)
                return part if follows else _Part(part.whole, ((),) * x.ndim)
        if not is_floating(x):
            return None  # a random key, say
        return _chosen(self.mesh, self.axes, x.shape, PartitionSpec())

    def gathered(self, own: optax.Params, changes: optax.Updates) -> optax.Updates:
        """Return the updates of whole params, from those of their parts."""
        parts = self.leaves.match(own, "`params`")
        updates = self.leaves.match(changes, "the updates of `tx`")
        for i, part in enumerate(self.parts):
            if part is None or is_absent(updates[i]) or not is_floating(updates[i]):
                continue
            updates[i] = self._gathered(
                part, self.leaves.values[i], parts[i], updates[i]
            )
        return self.leaves.unflatten(updates)

    def _gathered(
        self, part: _Part, param: jax.Array, own: jax.Array, change: jax.Array
    ) -> jax.Array:
        def whole(x: jax.Array) -> jax.Array:
            # As bits, from end to end: CPUs gather 16-bit floats as float32.
            pattern = lax.bitcast_convert_type(x, _pattern_dtype(x))
            pattern = _laid(pattern, self.mesh, part.part)
            return _laid(pattern, self.mesh, part.whole)

        if bits(change.dtype) <= bits(param.dtype):
            return lax.bitcast_convert_type(whole(change), change.dtype)
        # The param itself is fewer bytes than its update, which can be read off it: a
        # difference of two narrow floats that brings the one to the other.
        landed = whole((own.astype(change.dtype) + change).astype(param.dtype))
        difference = lax.bitcast_convert_type(landed, param.dtype).astype(
            change.dtype
        ) - param.astype(change.dtype)
        is_held = landed == lax.bitcast_convert_type(param, landed.dtype)
        # What is added to a param that stays, be it -0.0 or infinite.
        return jnp.where(is_held, -jnp.zeros((), change.dtype), difference)


def _checked_axes(mesh: Any, axis: Any) -> Names:
    """Return the names of the axes, which the mesh has."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"zero1: `mesh` is a {type(mesh).__name__}, expected a jax.sharding.Mesh, "
            'such as `jax.make_mesh((8,), ("data",))`.'
        )
    axes = (axis,) if isinstance(axis, str) else axis
    is_tuple = isinstance(axes, tuple) and axes and len(set(axes)) == len(axes)
    if not (is_tuple and all(name in mesh.axis_names for name in axes)):
        raise ValueError(
            f"zero1: `axis` is {axis!r}, expected an axis of the mesh, which has "
            f"{dict(mesh.shape)}, or a tuple of some of them."
        )
    return axes


def _check_not_manual(axes: Names) -> None:
    """Raise within `shard_map` over these axes, as far as this JAX can tell."""
    current = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    manual = [name for name in axes if name in getattr(current, "manual_axes", ())]
    if manual:
        raise ValueError(
            f"zero1: called within shard_map over `{manual[0]}`, where each rank has "
            "its own state already; use it under jit with shardings, or call "
            "`lax.psum_scatter` and `lax.all_gather` around `tx` yourself."
        )


def _declared(
    paths: Sequence[tuple[Any, ...]], param_specs: PyTree
) -> list[PartitionSpec]:
    """Return the `PartitionSpec` of each param; replicated where nothing is said."""

    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec | Sharding)

    given = tree_flatten_with_path(param_specs, is_leaf=is_spec)[0]
    found: list[PartitionSpec] = [PartitionSpec() for _ in paths]
    for path, spec in given:
        if not is_spec(spec):
            raise TypeError(
                f"zero1: `param_specs` is a {type(spec).__name__} at {place(path)}, "
                "expected a PartitionSpec or a sharding."
            )
        below = [i for i, at in enumerate(paths) if at[: len(path)] == path]
        if not below and spec is not None:
            raise ValueError(
                f"zero1: `param_specs` is {spec} at {place(path)}, where `params` has "
                "no leaf; expected a tree like `params`, or a prefix of it."
            )
        if isinstance(spec, Sharding):
            spec = getattr(spec, "spec", None)
        for i in below:
            found[i] = spec or PartitionSpec()
    return found


def _check_spec(spec: PartitionSpec, mesh: Mesh, param: jax.Array, where: str) -> None:
    names = {name for dim in range(len(spec)) for name in _names(spec, dim)}
    if len(spec) > param.ndim or not names <= set(mesh.axis_names):
        raise ValueError(
            f"zero1: `param_specs` is {spec} for param {where}, which is "
            f"{describe(param)}, expected at most one entry for each of its axes, of "
            f"names in the mesh, which has {dict(mesh.shape)}."
        )


def _check_placed(param: Any, mesh: Mesh, where: str) -> None:
    """Raise where a concrete array lies on other devices than those of the mesh."""
    is_concrete = isinstance(param, jax.Array) and not is_traced(param)
    if not is_concrete or isinstance(mesh, AbstractMesh) or mesh.size == 1:
        return
    sharding = param.sharding
    is_there = sharding.device_set == set(mesh.devices.flat)
    if isinstance(sharding, NamedSharding):
        is_there = is_there and sharding.mesh == mesh
    if not is_there:
        raise ValueError(
            f"zero1: param {where}, which is {describe(param)}, lies on {sharding}, "
            f"expected the mesh given to zero1, {mesh}. Put the params there first: "
            "`jax.device_put(params, NamedSharding(mesh, PartitionSpec()))`."
        )


def _known_spec(param: jax.Array) -> PartitionSpec | None:
    """Return how a param lies, if the array or its type says so."""
    if not is_traced(param):
        return getattr(getattr(param, "sharding", None), "spec", None)
    sharding = getattr(jax.typeof(param), "sharding", None)
    if sharding is None or not has_explicit_axes(sharding.mesh):
        return None
    return sharding.spec


def _chosen(
    mesh: Mesh, axes: Names, shape: tuple[int, ...], spec: PartitionSpec
) -> _Part | None:
    """Return how parts are taken: over each mesh axis along the first that divides."""
    whole = [_names(spec, dim) for dim in range(len(shape))]
    if any(name in names for names in whole for name in axes):
        return None
    parts = list(whole)
    for name in axes:
        for dim, size in enumerate(shape):
            if size and size % _count(mesh, (*parts[dim], name)) == 0:
                parts[dim] = (*parts[dim], name)
                break
    if parts == whole:
        return None
    taken = [part != before for part, before in zip(parts, whole, strict=True)]

    def where_taken(names: list[Names]) -> tuple[Names | None, ...]:
        return tuple(
            x if is_taken else None for x, is_taken in zip(names, taken, strict=True)
        )

    return _Part(where_taken(whole), where_taken(parts))


def _divides(
    mesh: Mesh, by_dim: tuple[Names | None, ...], shape: tuple[int, ...]
) -> bool:
    sizes = zip(by_dim, shape, strict=True)
    return all(size % _count(mesh, names or ()) == 0 for names, size in sizes)


def _names(spec: PartitionSpec, dim: int) -> Names:
    entry = tuple(spec)[dim] if dim < len(spec) else None
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _count(mesh: Mesh, names: Names) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _laid(x: jax.Array, mesh: Mesh, by_dim: tuple[Names | None, ...]) -> jax.Array:
    """Return `x`, sharded over these mesh axes, and as it was where none are named."""
    as_it_was: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    if has_explicit_axes(mesh):
        known = tuple(jax.typeof(x).sharding.spec)
        as_it_was = [*known, *[None] * (x.ndim - len(known))]
    spec = PartitionSpec(
        *(
            before if names is None else names or None
            for names, before in zip(by_dim, as_it_was, strict=True)
        )
    )
    if has_explicit_axes(mesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _pattern_dtype(x: jax.Array) -> jnp.dtype:
    return jnp.dtype(f"uint{bits(x.dtype)}")
