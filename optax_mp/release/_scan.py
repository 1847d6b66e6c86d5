"""A scan over layers whose backward pass takes the step of each layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp._jax._arrays import is_traced, to_device_tree, with_memory_of
from optax_mp._jax._contact import is_traced_by_jit
from optax_mp._jax._jaxpr import TracedCall, evaluate
from optax_mp.release._layers import ReleasedLayers, ReleasedStack, is_released
from optax_mp.trees._tree import only_inexact


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
    optimizer's step of each layer. With only arrays in `xs` it is `jax.lax.scan`, so
    one loss serves training with and without gradient release, and evaluation.

    Args:
        block: from the carry and a slice of `xs` to the new carry and an output. It
            may close over other params, and over any array: masks, positions, keys. Put
            here what changes the weights or the computation of a layer: casts,
            `jax.checkpoint`, `optax_mp.amp`, and `jax.vmap` over examples.
        carry: the first carry.
        xs: the layers that the loss was given, or a pytree of them and of arrays, such
            as `(layers, keys)`. Layers that are in it twice (tied weights) take one
            step, with the sum of both gradients.
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
    settings = {"reverse": reverse, "unroll": unroll}
    released = _each_once(leaves)
    if not released:
        return lax.scan(block, carry, xs, **settings)
    place_of = {x.stack: i for i, x in enumerate(released)}
    others = [None if is_released(x) else x for x in leaves]

    def of_slices(carry: Any, slices: tuple[list[Any], list[Any]]) -> Any:
        weights, others = slices
        # Tied weights are one argument, read in several places: JAX adds up their
        # gradients before the step.
        filled = [
            weights[place_of[x.stack]] if is_released(x) else other
            for x, other in zip(leaves, others, strict=True)
        ]
        return block(carry, treedef.unflatten(filled))

    slices = [x.layers for x in released], others
    # As in `lax.scan`, a Python number in the carry gets the dtype of the next carry.
    after, _ = jax.eval_shape(lambda carry: lax.scan(of_slices, carry, slices), carry)
    carry = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), carry, after)
    loop_block, consts = _with_closed_over(of_slices, (carry, layer_at(slices, 0)))
    _refuse_vmap((carry, others, consts))
    loop = _Loop(loop_block, settings)
    scan = jax.custom_vjp(lambda *args: loop.forward(*args)[0])
    scan.defvjp(loop.forward, loop.backward)
    return scan(released, carry, others, consts)


def _each_once(leaves: list[Any]) -> list[ReleasedLayers]:
    """Return the released layers among some leaves, once if they are there twice."""
    found: dict[ReleasedStack, ReleasedLayers] = {}
    for x in filter(is_released, leaves):
        first = found.setdefault(x.stack, x)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(x), strict=True)
        if not all(a is b for a, b in pairs):
            raise ValueError(
                "scan_layers: expected the same layers wherever they are in `xs`, got "
                "two versions of them, and each would take a step; change or cast them "
                "in the block."
            )
    return list(found.values())


def _with_closed_over(function: Callable[..., Any], args: Any) -> tuple[Any, list[Any]]:
    """Return a function that takes what `function` closes over as its last argument.

    A derivative rule runs later, in another trace, and must not close over arrays of
    this one, whatever their dtype. `jax.closure_convert` only finds floats.
    """
    traced = TracedCall.of(lambda args: function(*args), args)

    def run(*args: Any) -> Any:
        closed = traced.closed.replace(consts=args[-1])
        return traced.unflatten(evaluate(closed, jax.tree.leaves(args[:-1])))

    return run, list(traced.closed.consts)


def _refuse_vmap(arrays: Any) -> None:
    """Raise within a `vmap` of the loss, where each example would take a step."""
    if any(is_traced(x) and not is_traced_by_jit(x) for x in jax.tree.leaves(arrays)):
        raise ValueError(
            "scan_layers: expected one scan of released layers for the whole batch, "
            "got one within `jax.vmap` or `jax.grad`; transform the layer instead, as "
            "`jax.vmap(layer, in_axes=(0, None))` in the block."
        )


def layer_at(tree: Any, index: Any) -> Any:
    """Return the arrays of one layer from stacked ones."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree
    )


def _with_layer(tree: Any, new: Any, index: Any) -> Any:
    """Return stacked arrays with other ones of one layer, in the memory they are in."""
    # In host memory, XLA takes no array that a reshape makes.
    new = with_memory_of(jax.tree.map(lambda x: x[None], new), tree)
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
        vjp_def: the structure of the function that computes derivatives.
        like: descriptions of what the block returns.
    """

    block: Callable[..., Any]
    settings: dict[str, Any]
    places: list[int | None] = field(default_factory=list)
    vjp_def: Any = None
    like: Any = None

    def block_vjp(self, saved: Any, readable: Any, cotangents: Any) -> Any:
        """Return the gradients of the block's arguments."""
        rest, leaves = iter(saved), jax.tree.leaves(readable)
        needed = [next(rest) if i is None else leaves[i] for i in self.places]

        def fill(x: Any, grad: Any) -> Any:
            # JAX wants a zero of a special dtype for what is not differentiated.
            return np.zeros(x.shape, jax.dtypes.float0) if grad is None else grad

        filled = jax.tree.map(fill, self.like, cotangents)
        return only_inexact(self.vjp_def.unflatten(needed)(filled))

    def forward(self, released: Any, carry: Any, others: Any, consts: Any) -> Any:
        """Return the results of the scan, and what its derivatives need."""
        stacks = [x.stack for x in released]

        def body(carry: Any, slices: Any) -> Any:
            layers, others = slices
            weights = list(map(ReleasedStack.in_rows, stacks, layers))
            readable = weights, others, consts
            (after, outputs), vjp = jax.vjp(self.block, carry, *readable)
            self.like = jax.eval_shape(lambda: (after, outputs))
            # The function is a pytree of the arrays that it needs. Weights and masks
            # among them are there anyway: only the others are saved, layer by layer.
            needed, self.vjp_def = jax.tree.flatten(vjp)
            place_of = {id(x): i for i, x in enumerate(jax.tree.leaves(readable))}
            self.places = [place_of.get(id(x)) for x in needed]
            return after, (outputs, [x for x in needed if id(x) not in place_of])

        layers = [x.layers for x in released]
        carry, (ys, saved) = lax.scan(body, carry, (layers, others), **self.settings)
        return (carry, ys), (released, saved, others, consts)

    def backward(self, kept: Any, cotangents: Any) -> Any:
        """Return the layers after their steps, and the gradients of all else."""
        released, saved, others, consts = kept
        stacks, factors = [x.stack for x in released], [x.factor for x in released]
        after, of_outputs = only_inexact(cotangents)

        def body(loop_carry: Any, slices: Any) -> Any:
            after, totals, layers, states = loop_carry
            i, saved, others, of_outputs = slices
            # If gradients are only measured, no layers are carried.
            now = [y if x is None else x for x, y in zip(layers, old, strict=True)]
            weights, own_states = layer_at((now, states), i)
            used = list(map(ReleasedStack.in_rows, stacks, weights))
            before, grads, of_others, of_consts = self.block_vjp(
                saved, (used, others, consts), (after, of_outputs)
            )
            args = stacks, grads, to_device_tree(own_states), weights, factors
            new = tuple(map(list, zip(*map(ReleasedStack.step, *args), strict=True)))
            # Layers and states are carried, and so overwritten in place: as outputs of
            # the loop they would exist twice.
            layers, states = _with_layer((layers, states), new, i)
            totals = jax.tree.map(jnp.add, totals, of_consts)
            return (before, totals, layers, states), of_others

        old = [x.layers for x in released]
        layers = [None if x.measures else y for x, y in zip(stacks, old, strict=True)]
        states = [x.opt_state for x in released]
        totals = jax.tree.map(jnp.zeros_like, only_inexact(consts))
        # The first layer that the block passed comes last.
        backward = self.settings | {"reverse": not self.settings["reverse"]}
        (before, totals, layers, states), of_others = lax.scan(
            body,
            (after, totals, layers, states),
            (jnp.arange(len(jax.tree.leaves(old)[0])), saved, others, of_outputs),
            **backward,
        )
        for stack in stacks:
            stack.is_stepped = True
        # To JAX, these are the gradients of `released`.
        stepped = map(ReleasedLayers.of, layers, states, stacks)
        return list(stepped), before, of_others, totals
