"""zero1: an optimizer's state sharded over the axis of data parallelism."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_leaves_with_path
from jax.typing import DTypeLike

from optax_mp.core import _dtypes
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._jaxpr import TracedCall, is_dynamic
from optax_mp.core.trees import _tree
from optax_mp.core.trees._descriptions import fill_spec, place_like_params
from optax_mp.core.trees._leaves import Leaves, is_absent
from optax_mp.core.trees._states import find_owners
from optax_mp.core.wrappers import _protocol
from optax_mp.core.wrappers._arguments import require_params
from optax_mp.devices import _shardings, _sum


def zero1(
    inner: optax.GradientTransformation,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    *,
    param_specs: Any = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Shard the state of `inner` over a mesh axis on which params are replicated.

    Each of N devices that hold the same params keeps and updates 1/N of masters and
    moments. Then the new params are gathered in their own dtype: 2 bytes per weight
    where float32 updates would take 4. The updates are their differences from the old
    params.

    Put it outermost: a transformation around it is not sharded. The state is `inner`'s,
    with other shardings: `master_params`, `loss_scale`, checkpoints and
    `convert_opt_state` work as before, and a run can continue with `zero1`, without it,
    or on another number of devices. `init` allocates on each device only its own part,
    under `jit` or outside. Derivatives through `update` are zero.

    The results are `inner`'s. They are bit-equal for params that have a master,
    if its rule is elementwise. If the rule sums over a whole array, as for a norm, the
    sum is taken in another order. Float32 params that are their own master may differ
    by one rounding: without a gather in between, XLA contracts the last multiplication
    of the rule with the addition that follows.

    Each array is cut along the first dimension that N divides. An array without such a
    dimension is sharded as the params are, and so is one that is already sharded over
    `axis`. If N does not divide any dimension of large arrays, split it into two mesh
    axes and name both: they can then cut two dimensions of one array.

    If a cut goes through a line of `low_bit_state`, whose values share a scale, devices
    send each other the largest value of their parts.

    With `exchange_dtype` it also sums the gradients, as `sum_gradients` does: they are
    sent in 16 bits, and added in float32 in the order of the devices. `update` then
    takes one gradient for each device, along a leading axis of N that is sharded over
    `axis`. `jax.vmap` over a batch in N parts makes them, as the guide to many devices
    shows. Arrays that are not cut are sent to all devices.

    Use it under `jit` with automatic sharding, or with explicit sharding if the rules
    are elementwise. Within `jax.shard_map` over `axis` every rank has its own state
    already.

    Args:
        inner: any optax optimizer, such as
            `dynamic_loss_scale(mixed_precision(adamw))`.
        mesh: the mesh that the params are on.
        axis: the name of the axis of data parallelism, or a tuple of names.
        param_specs: how the params are sharded over other axes, so that both combine: a
            tree of `PartitionSpec` or shardings like the params, or a prefix of one. By
            default params are replicated.
        exchange_dtype: the dtype in which each device sends its gradients: bfloat16,
            float16 or float32. By default, pass gradients that are already summed.

    Returns:
        The transformation.

    Raises:
        TypeError: if `inner` is not a gradient transformation.
        ValueError: if `mesh` has no such axis, or `param_specs` or the shape of a
            gradient does not fit, or `exchange_dtype` is another dtype.

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
    inner = _protocol.as_transformation(inner, "zero1")
    axes = _check_axes(mesh, axis)
    dtype = None
    if exchange_dtype is not None:
        dtype = _sum.check_exchange_dtype(exchange_dtype, "zero1")

    def init_fn(params: optax.Params) -> optax.OptState:
        cuts = _Cuts(params, mesh, axes, param_specs)

        def init_parts(given: optax.Params) -> optax.OptState:
            return cuts.cut(place_like_params(inner.init(given), given))

        # One program, so that no device ever holds more than its part.
        return TracedCall.of(init_parts, params).run()

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        cuts = _Cuts(require_params(params, "zero1"), mesh, axes, param_specs)
        _warn_if_elsewhere(state, cuts.shardings_of(state))
        if dtype is not None:
            updates = cuts.sum(updates, dtype)
        if extra_args.get("grad") is not None:
            extra_args = {**extra_args, "grad": cuts.cut(extra_args["grad"])}
        parts = cuts.cut(params)
        args = cuts.cut(updates), cuts.cut(state), parts
        changes, state = _protocol.update_inner(inner, "zero1", *args, **extra_args)
        return cuts.gather_updates(parts, changes), cuts.cut(state)

    return _protocol.Transformation.of("zero1", init_fn, update_fn)


class _Cuts:
    """How the params are cut, and with them the arrays that belong to each.

    Attributes:
        leaves: the params.
        mesh: the mesh that they are on.
        axes: the axes of data parallelism.
        specs: how each param is sharded before.
        by_param: the cut of each param that is cut, by its index.
    """

    def __init__(
        self, params: Any, mesh: Mesh, axes: _arrays.MeshAxes, specs: Any
    ) -> None:
        self.mesh, self.axes = mesh, axes
        self.leaves = leaves = Leaves.of(params, caller="zero1")
        self.specs = _specs_of(params, specs)
        self.by_param: dict[int, _shardings.ArrayCut] = {}
        for i, param in enumerate(leaves.values):
            if not (is_dynamic(param) and _dtypes.is_floating(param)):
                continue
            spec, where = self.specs[i], _tree.spell(leaves.paths[i])
            _check_spec(spec, mesh, param, where)
            known = _shardings.known_spec(param)
            if known is not None and mesh.explicit_axes:
                spec = self.specs[i] = known
            if cut := _shardings.choose_cut(mesh, axes, param.shape, spec):
                self.by_param[i] = cut
            # Under jit with automatic sharding only `spec` is known.
            if known is not None and cut != _shardings.choose_cut(
                mesh, axes, param.shape, known
            ):
                raise ValueError(
                    f"zero1: expected param {where}, which is "
                    f"{_arrays.describe(param)}, to be sharded as {spec}, got {known}; "
                    "pass `param_specs=jax.tree.map(lambda p: p.sharding, params)`."
                )

    def shardings_of(self, state: Any) -> list[NamedSharding | None]:
        """Return how arrays of a state with their param's shape are cut, else None."""
        specs = list(self.specs)
        for i, cut in self.by_param.items():
            specs[i] = fill_spec(cut.part, specs[i])
        params = self.leaves.values
        owners = self._owners(state)
        return [
            None
            if i is None or jnp.shape(x) != jnp.shape(params[i])
            else NamedSharding(self.mesh, specs[i])
            for x, i in zip(jax.tree.leaves(state), owners, strict=True)
        ]

    def cut(self, tree: Any) -> Any:
        """Return `tree` with its arrays cut, each as the param that it belongs to."""
        values, treedef = jax.tree.flatten(tree)
        for i, owner in enumerate(self._owners(tree)):
            part = self._part_of(values[i], owner)
            if part is not None:
                values[i] = _shardings.shard(values[i], self.mesh, part)
        return treedef.unflatten(values)

    def sum(self, grads: Any, dtype: jnp.dtype) -> Any:
        """Return the sum of the gradients of each device, cut as the params are."""
        values = self.leaves.match(grads, "the gradients")
        count = _arrays.shard_count(self.mesh, self.axes)
        for i, grad in enumerate(values):
            param = self.leaves.values[i]
            if is_absent(grad) or not _dtypes.is_floating(param):
                continue
            if jnp.shape(grad) != (count, *param.shape):
                raise ValueError(
                    "zero1: expected the gradient at "
                    f"{_tree.spell(self.leaves.paths[i])} to have a leading axis of "
                    f"{count} devices before {param.shape}, got "
                    f"{_arrays.describe(grad)}; take gradients by `jax.vmap`, or leave "
                    "out `exchange_dtype`."
                )
            whole, part = self.by_param.get(i, (PartitionSpec(), self.specs[i]))
            patterns = _sum.as_pattern(grad, dtype)
            # Each device holds a whole gradient, and then a part of all of them: XLA
            # makes an all-to-all of that.
            for spec in ((self.axes, *whole), (None, *part)):
                patterns = _shardings.shard(patterns, self.mesh, PartitionSpec(*spec))
            values[i] = _sum.sum_patterns(patterns, dtype)
        return self.leaves.unflatten(values)

    def _owners(self, tree: Any) -> list[int | None]:
        """Return the index of the param that each array of a tree belongs to."""
        return find_owners(tree, self.leaves.unflatten(self.leaves.values))

    def _part_of(self, x: Any, owner: int | None) -> PartitionSpec | None:
        """Return how an array is cut that belongs to a param, or to none."""
        if not is_dynamic(x) or (owner is not None and owner not in self.by_param):
            return None
        if owner is not None:
            param, cut = self.leaves.values[owner], self.by_param[owner]
            if _tree.ends_in(x, param.shape):
                # The param's own shape, or a stack of such arrays, as L-BFGS keeps.
                front = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - param.ndim)
                return PartitionSpec(*front, *cut.part)
            if x.ndim == param.ndim:
                # Scales, for example, are cut as the param is, or not at all:
                # with another cut each step would gather them.
                fits = all(
                    n % _arrays.shard_count(self.mesh, _arrays.axis_names(cut.part, i))
                    == 0
                    for i, n in enumerate(x.shape)
                )
                return cut.part if fits else PartitionSpec()
        if not _dtypes.is_floating(x):
            return None  # such as a random key
        cut = _shardings.choose_cut(self.mesh, self.axes, x.shape, PartitionSpec())
        return cut.part if cut else None

    def gather_updates(self, params: Any, changes: optax.Updates) -> optax.Updates:
        """Return the updates of whole params, from parts of these and their updates."""
        parts = self.leaves.match(params, "`params`")
        updates = self.leaves.match(changes, "the updates of `inner`")
        for i, cut in self.by_param.items():
            if _dtypes.is_floating(updates[i]):
                args = self.leaves.values[i], parts[i], updates[i]
                updates[i] = _whole_update(partial(_gather, self.mesh, cut), *args)
        return self.leaves.unflatten(updates)


def _specs_of(params: Any, param_specs: Any) -> list[PartitionSpec]:
    """Return the `PartitionSpec` of each param; replicated where `param_specs` is None.

    Args:
        params: the params.
        param_specs: a tree of specs or shardings like the params, or a prefix of one.
    """
    specs = []
    for spec in _tree.spread_prefix(params, param_specs, "zero1: `param_specs`"):
        if not isinstance(spec, PartitionSpec | Sharding | None):
            raise TypeError(
                "zero1: expected `param_specs` to hold PartitionSpecs or shardings, "
                f"got {spec!r}."
            )
        # Of shardings, only a NamedSharding has a spec.
        is_spec = isinstance(spec, PartitionSpec)
        specs.append(spec if is_spec else getattr(spec, "spec", PartitionSpec()))
    return specs


def _check_spec(spec: PartitionSpec, mesh: Mesh, param: Any, where: str) -> None:
    """Raise unless a spec fits the axes of the mesh and the rank of the param."""
    names = {name for dim in range(len(spec)) for name in _arrays.axis_names(spec, dim)}
    if len(spec) > param.ndim or not names <= set(mesh.axis_names):
        raise ValueError(
            "zero1: expected `param_specs` to name mesh axes for the dimensions of "
            f"param {where}, which is {_arrays.describe(param)}, got {spec}; the mesh "
            f"has {dict(mesh.shape)}."
        )


def _warn_if_elsewhere(state: Any, shardings: Sequence[NamedSharding | None]) -> None:
    """Warn if a state is not cut as its params are, as far as arrays or types say."""
    leaves = tree_leaves_with_path(state)
    for (path, leaf), wanted in zip(leaves, shardings, strict=True):
        spec = _shardings.known_spec(leaf) if wanted else None
        if wanted and spec is not None and not _cuts_alike(spec, wanted, leaf.ndim):
            warn(
                f"zero1: expected {_tree.spell(path)} of the state to be sharded as "
                f"{wanted.spec}, got {_arrays.describe(leaf)} as {spec}, which this "
                "step moves; give `jit` and checkpoints the shardings "
                "`state_shardings(tx, params)`."
            )
            return


def _cuts_alike(spec: PartitionSpec, wanted: NamedSharding, rank: int) -> bool:
    """Return whether a spec cuts an array of this rank as a sharding does."""
    # An axis of one device cuts nothing. The spec may name axes of another mesh.
    sizes = wanted.mesh.shape

    def cuts(spec: PartitionSpec) -> list[list[str]]:
        names = (_arrays.axis_names(spec, dim) for dim in range(rank))
        return [[name for name in each if sizes.get(name) != 1] for each in names]

    return cuts(spec) == cuts(wanted.spec)


def _gather(mesh: Mesh, cut: _shardings.ArrayCut, x: jax.Array) -> jax.Array:
    """Return a whole array from its parts."""
    pattern = _shardings.shard(_sum.as_pattern(x, x.dtype), mesh, cut.part)
    return lax.bitcast_convert_type(_shardings.shard(pattern, mesh, cut.whole), x.dtype)


def _whole_update(gather: Any, param: jax.Array, part: Any, change: Any) -> Any:
    """Return the update of a whole param, from its part and the update of the part."""
    if _dtypes.bits(change.dtype) <= _dtypes.bits(param.dtype):
        return gather(change)
    # The param has fewer bytes than its update, so the new param is gathered. The
    # update is its difference from the old one. Added to that, and rounded to the
    # narrow dtype, it gives exactly the new param.
    new = gather((part.astype(change.dtype) + change).astype(param.dtype))
    difference = new.astype(change.dtype) - param.astype(change.dtype)
    # An update of -0.0 leaves every param unchanged, also -0.0 and an infinity.
    is_unchanged = _sum.as_pattern(new, new.dtype) == _sum.as_pattern(
        param, param.dtype
    )
    return jnp.where(is_unchanged, -jnp.zeros((), change.dtype), difference)


def _check_axes(mesh: Any, axis: Any) -> _arrays.MeshAxes:
    """Return the names of the axes, or raise if the mesh does not have them."""
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh | AbstractMesh) else {}
    axes = (axis,) if isinstance(axis, str) else axis
    are_distinct = isinstance(axes, tuple) and axes and len(set(axes)) == len(axes)
    if not (are_distinct and all(name in sizes for name in axes)):
        raise ValueError(
            "zero1: expected `axis` to be an axis of `mesh`, which is a "
            f"{type(mesh).__name__} of {sizes}, or a tuple of several, got {axis!r}; "
            "make a mesh by `jax.make_mesh`."
        )
    return axes
