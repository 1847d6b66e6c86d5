"""A scan over layers whose backward pass takes the step of each layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp._jax._arrays import is_traced
from optax_mp._jax._contact import is_traced_by_jit
from optax_mp._jax._experimental import with_major_to_minor
from optax_mp._jax._memory import bring, put_beside
from optax_mp._take_step import take_step
from optax_mp._tree import in_float32, is_inexact, is_key, only_inexact


def scan_layers(
    block: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Scan a block over stacked layers, as `jax.lax.scan` does.

    In the loss of `release_gradients`, the backward pass of this scan takes the
    optimizer's step of each layer. With arrays alone in `xs` it is `jax.lax.scan`, so
    one loss serves training with and without gradient release, and evaluation.

    Args:
        block: from the carry and a slice of `xs` to the new carry and an output. It
            may close over other params. Put here what changes the weights or the
            computation of a layer: casts, `jax.checkpoint`, `optax_mp.amp`, and
            `jax.vmap` over examples.
        carry: the first carry.
        xs: the layers that the loss was given, or a pytree of them and of arrays, such
            as `(layers, keys)`.
        reverse: whether to begin with the last layer.
        unroll: how many layers an iteration of the loop computes.

    Returns:
        The last carry, and the outputs, stacked.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> layers = jnp.array([2.0, 3.0])
        >>> carry, _ = optax_mp.scan_layers(lambda x, w: (w * x, None), 1.0, layers)
        >>> float(carry)
        6.0
    """
    leaves, treedef = jax.tree.flatten(xs, is_leaf=is_released)
    released = list(filter(is_released, leaves))
    if not released:
        return lax.scan(block, carry, xs, reverse=reverse, unroll=unroll)
    others = [None if is_released(x) else x for x in leaves]

    def of_slices(carry: Any, weights: list[Any], others: list[Any]) -> Any:
        rest = iter(weights)
        # A leaf is never None, which is no leaf.
        slices = [next(rest) if x is None else x for x in others]
        return block(carry, treedef.unflatten(slices))

    loop = _Loop(of_slices, {"reverse": reverse, "unroll": unroll})
    # As in `lax.scan`, a Python number in the carry gets the dtype of the next carry.
    layers = [x.layers for x in released]
    after, _ = jax.eval_shape(loop.run, layers, carry, others)
    carry = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), carry, after)
    # What the block closes over and is differentiated becomes an argument.
    first = carry, layer_at(layers, 0), layer_at(others, 0)
    loop.block, consts = jax.closure_convert(of_slices, *first)
    return _stepping_scan(loop)(released, carry, others, consts)


@dataclass(eq=False)
class Stack:
    """What is static of stacked layers.

    Attributes:
        tx: their optimizer.
        kinds: of layers and state: dtypes, or the implementations of random keys.
        shardings: how the weights of a layer are sharded, a tree like them; or None.
        is_stepped: whether the backward pass was traced, and so takes steps.
    """

    tx: Any
    kinds: Any
    shardings: Any
    is_stepped: bool = False

    def step(self, grads: Any, opt_state: Any, weights: Any) -> tuple[Any, Any]:
        """Return (weights, opt_state) of one layer after its step."""
        # Else XLA may drop their rounding, and send float32 between devices.
        grads = in_float32(lax.optimization_barrier(self.in_rows(grads)))
        return take_step(
            self.tx, grads, opt_state, weights, param_shardings=self.shardings
        )

    def in_rows(self, tree: Any) -> Any:
        """Return arrays of one layer in row-major order, if shardings are known.

        To gather shards of the last axis, XLA for GPUs wants this axis first in memory,
        and transposes all layers and their state before and after the loop.
        """

        def constrain(x: Any, sharding: Any) -> Any:
            if sharding is None or jnp.ndim(x) < 2:
                return x
            rows, spec = tuple(range(x.ndim)), sharding.spec
            # Without `shard_map`, the constraint would gather the array.
            return jax.shard_map(
                lambda part: with_major_to_minor(part, rows),
                mesh=sharding.mesh,
                in_specs=spec,
                out_specs=spec,
            )(x)

        if self.shardings is None:
            return tree
        return jax.tree.map(constrain, tree, self.shardings)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["float_layers", "float_state"],
    meta_fields=["stack"],
)
@dataclass(frozen=True, eq=False)
class ReleasedLayers:
    """What a loss gets in place of stacked layers, for `scan_layers`.

    Its arrays are floats, because their "gradients" are the arrays after the step.
    """

    float_layers: Any
    float_state: Any
    stack: Stack

    @classmethod
    def of(cls, layers: Any, opt_state: Any, stack: Stack) -> "ReleasedLayers":
        """Return layers with the state of their optimizer."""
        return cls(_as_floats(layers), _as_floats(opt_state), stack)

    @property
    def layers(self) -> Any:
        """The stacked layers."""
        return _from_floats(self.float_layers, self.stack.kinds[0])

    @property
    def opt_state(self) -> Any:
        """The state of their optimizer, stacked."""
        return _from_floats(self.float_state, self.stack.kinds[1])


def is_released(x: Any) -> bool:
    """Return whether this is `ReleasedLayers`."""
    return isinstance(x, ReleasedLayers)


_FLOAT_OF_SIZE = {1: "float8_e5m2", 2: "bfloat16", 4: "float32", 8: "float64"}


def kind_of(x: Any) -> Any:
    """Return the dtype of an array, or the implementation of random keys."""
    return jax.random.key_impl(x) if is_key(x) else x.dtype


def _as_floats(tree: Any) -> Any:
    """Return arrays with the same bits, of dtypes that JAX differentiates."""

    def convert(x: Any) -> Any:
        if is_inexact(x):
            return x
        x = jax.random.key_data(x) if is_key(x) else x
        if x.dtype == np.bool_:
            return x.astype(jnp.float32)
        return lax.bitcast_convert_type(x, _FLOAT_OF_SIZE[x.dtype.itemsize])

    return jax.tree.map(convert, tree)


def _from_floats(tree: Any, kinds: Any) -> Any:
    """Return the arrays that `_as_floats` was given."""

    def convert(x: Any, kind: Any) -> Any:
        if isinstance(kind, np.dtype):
            if kind == np.bool_ or jnp.issubdtype(kind, jnp.inexact):
                return lax.convert_element_type(x, kind)
            return lax.bitcast_convert_type(x, kind)
        data = lax.bitcast_convert_type(x, jnp.uint32)
        return jax.random.wrap_key_data(data, impl=kind)

    return jax.tree.map(convert, tree, kinds)


def layer_at(tree: Any, index: Any) -> Any:
    """Return the arrays of one layer from stacked ones."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree
    )


def _with_layer(tree: Any, new: Any, index: Any) -> Any:
    """Return stacked arrays with other ones of one layer, in the memory they are in."""
    # In host memory, XLA takes no array that a reshape makes.
    new = put_beside(jax.tree.map(lambda x: x[None], new), tree)
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, index, 0), tree, new
    )


@dataclass
class _Loop:
    """A block of one layer, and what its derivatives need.

    Attributes:
        block: from a carry, weights, other slices and constants to a carry and outputs.
        settings: of `lax.scan`.
        places: for each array that derivatives need, which argument of the block but
            the carry it is, and so is read again; None for one that is saved.
        pull_def: the structure of the function that computes derivatives.
        like: descriptions of what the block returns.
    """

    block: Callable[..., Any]
    settings: dict[str, Any]
    places: list[int | None] = field(default_factory=list)
    pull_def: Any = None
    like: Any = None

    def run(self, layers: Any, carry: Any, others: Any, *consts: Any) -> Any:
        """Scan the block."""
        return lax.scan(
            lambda carry, slices: self.block(carry, *slices, *consts),
            carry,
            (layers, others),
            **self.settings,
        )

    def saving(self, carry: Any, *readable: Any) -> tuple[Any, Any]:
        """Return what the block returns, with what derivatives need beside outputs."""
        (after, outputs), pull = jax.vjp(self.block, carry, *readable)
        self.like = jax.eval_shape(lambda: (after, outputs))
        needed, self.pull_def = jax.tree.flatten(pull)
        place_of = {id(x): i for i, x in enumerate(jax.tree.leaves(readable))}
        self.places = [place_of.get(id(x)) for x in needed]
        return after, (outputs, [x for x in needed if id(x) not in place_of])

    def pull(self, saved: Any, readable: Any, cotangents: Any) -> Any:
        """Return the gradients of the block's arguments."""
        rest: Iterator[Any] = iter(saved)
        leaves = jax.tree.leaves(readable)
        needed = [next(rest) if i is None else leaves[i] for i in self.places]
        # JAX wants a zero of a dtype of its own for what is not differentiated.
        filled = jax.tree.map(
            lambda x, g: np.zeros(x.shape, jax.dtypes.float0) if g is None else g,
            self.like,
            cotangents,
        )
        return only_inexact(self.pull_def.unflatten(needed)(filled))


def _stepping_scan(loop: _Loop) -> Callable[..., Any]:
    """Return the scan of released layers, a carry, other arrays and constants."""

    @jax.custom_vjp
    def scan(released: Any, carry: Any, others: Any, consts: Any) -> Any:
        return loop.run([x.layers for x in released], carry, others, *consts)

    def scan_fwd(released: Any, carry: Any, others: Any, consts: Any) -> Any:
        stacks = [x.stack for x in released]

        def body(carry: Any, slices: Any) -> Any:
            layers, others = slices
            weights = list(map(Stack.in_rows, stacks, layers))
            return loop.saving(carry, weights, others, *consts)

        layers = [x.layers for x in released]
        carry, (ys, saved) = lax.scan(body, carry, (layers, others), **loop.settings)
        return (carry, ys), (released, saved, others, consts)

    def scan_bwd(kept: Any, cotangents: Any) -> Any:
        released, saved, others, consts = kept
        stacks = [x.stack for x in released]
        after, of_outputs = only_inexact(cotangents)
        arrays = [x.layers for x in released], [x.opt_state for x in released]
        _refuse_vmap(after, arrays[0])

        def body(loop_carry: Any, slices: Any) -> Any:
            after, totals, layers, states = loop_carry
            i, saved, others, of_outputs = slices
            weights, own_states = layer_at((layers, states), i)
            used = list(map(Stack.in_rows, stacks, weights))
            readable = used, others, *consts
            before, grads, of_others, *of_consts = loop.pull(
                saved, readable, (after, of_outputs)
            )
            stepped = map(Stack.step, stacks, grads, bring(own_states), weights)
            weights, own_states = map(list, zip(*stepped, strict=True))
            totals = jax.tree.map(jnp.add, totals, of_consts)
            trees = _with_layer((layers, states), (weights, own_states), i)
            return (before, totals, *trees), of_others

        count = jax.tree.leaves(arrays)[0].shape[0]
        totals = jax.tree.map(jnp.zeros_like, list(consts))
        backward = loop.settings | {"reverse": not loop.settings["reverse"]}
        slices = jnp.arange(count), saved, others, of_outputs
        (before, totals, *trees), of_others = lax.scan(
            body, (after, totals, *arrays), slices, **backward
        )
        for stack in stacks:
            stack.is_stepped = True
        new = list(map(ReleasedLayers.of, *trees, stacks))
        return new, before, of_others, type(consts)(totals)

    scan.defvjp(scan_fwd, scan_bwd)
    return scan


def _refuse_vmap(cotangents: Any, layers: Any) -> None:
    """Raise within a `vmap` of the loss, where each example would take a step."""
    kinds = set(map(type, jax.tree.leaves(layers)))
    for x in jax.tree.leaves(cotangents):
        if is_traced(x) and not is_traced_by_jit(x) and type(x) not in kinds:
            raise ValueError(
                "scan_layers: expected one scan of released layers for the whole "
                "batch, got one within `jax.vmap` or `jax.grad`; transform the layer "
                "instead, as `jax.vmap(layer, in_axes=(0, None))` in the block."
            )
