"""A scan over layers whose backward pass takes the step of each layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._contact import is_traced_by_jit
from optax_mp.core.jax_api._jaxpr import TracedCall, evaluate
from optax_mp.core.trees._tree import only_inexact
from optax_mp.release import _layers


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
        block: a function of (carry, slice of `xs`) that returns (new carry, output). It
            may close over other params, and over any array: masks, positions, keys.
            Whatever changes the weights or the computation of a layer belongs in the
            block: casts, `jax.checkpoint`, `optax_mp.amp`, and `jax.vmap` over
            examples.
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
    leaves, treedef = jax.tree.flatten(xs, is_leaf=_layers.is_released)
    settings = {"reverse": reverse, "unroll": unroll}
    released = _each_once(leaves)
    if not released:
        return lax.scan(block, carry, xs, **settings)
    place_of = {x.stepper: i for i, x in enumerate(released)}
    others = [None if _layers.is_released(x) else x for x in leaves]

    def of_slices(carry: Any, slices: tuple[list[Any], list[Any]]) -> Any:
        weights, others = slices
        # Tied weights are one argument, read in several places: JAX adds up their
        # gradients before the step.
        filled = [
            weights[place_of[x.stepper]] if _layers.is_released(x) else other
            for x, other in zip(leaves, others, strict=True)
        ]
        return block(carry, treedef.unflatten(filled))

    slices = [x.layers for x in released], others
    # As in `lax.scan`, a Python number in the carry gets the dtype of the next carry.
    after, _ = jax.eval_shape(lambda carry: lax.scan(of_slices, carry, slices), carry)
    carry = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), carry, after)
    traced = TracedCall.of(lambda x: of_slices(*x), (carry, layer_at(slices, 0)))
    consts = list(traced.closed.consts)
    _refuse_vmap((carry, others, consts))
    layer_scan = _LayerScan(
        _with_consts_as_argument(traced), traced.unflatten_outputs(), settings
    )
    scan = jax.custom_vjp(lambda *args: layer_scan.forward(*args)[0])
    scan.defvjp(layer_scan.forward, layer_scan.backward)
    return scan(released, carry, others, consts)


def _each_once(leaves: list[Any]) -> list[_layers.ReleasedLayers]:
    """Return the released layers among some leaves, once if they are there twice."""
    found: dict[_layers.Stepper, _layers.ReleasedLayers] = {}
    for x in filter(_layers.is_released, leaves):
        first = found.setdefault(x.stepper, x)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(x), strict=True)
        if not all(a is b for a, b in pairs):
            raise ValueError(
                "scan_layers: expected the same layers wherever they are in `xs`, got "
                "two versions of them; change or cast them in the block."
            )
    return list(found.values())


def _with_consts_as_argument(traced: TracedCall) -> Callable[..., Any]:
    """Return a traced function that takes what it closes over as its last argument.

    A derivative rule runs later, in another trace, and must not close over arrays of
    this one, whatever their dtype. `jax.closure_convert` only finds floats.
    """

    def run(*args: Any) -> Any:
        closed = traced.closed.replace(consts=args[-1])
        return traced.unflatten(evaluate(closed, jax.tree.leaves(args[:-1])))

    return run


def _refuse_vmap(arrays: Any) -> None:
    """Raise within a `vmap` of the loss, where each example would take a step."""
    if any(
        _arrays.is_traced(x) and not is_traced_by_jit(x)
        for x in jax.tree.leaves(arrays)
    ):
        raise ValueError(
            "scan_layers: expected one scan for the whole batch, got one within "
            "`jax.vmap` or `jax.grad`; use `jax.vmap(layer, in_axes=(0, None))` in "
            "the block."
        )


def layer_at(tree: Any, index: Any) -> Any:
    """Return the arrays of one layer from stacked ones."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree
    )


def _with_layer(tree: Any, new: Any, index: Any) -> Any:
    """Return stacked arrays with new values for one layer, in the same memory."""
    # In host memory, XLA takes no array that a reshape makes.
    new = _arrays.with_memory_of(jax.tree.map(lambda x: x[None], new), tree)
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, index, 0), tree, new
    )


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Argument:
    """Stands for an argument of the block among the arrays that derivatives need."""

    index: int


def _without_arguments(vjp: Any, arguments: Any) -> Any:
    """Return what `jax.vjp` made of a block, without the arrays that the block took.

    It is a pytree of the arrays that derivatives need, which the loop saves for each
    layer. Weights and masks among them are there anyway.
    """
    index_of = {id(x): i for i, x in enumerate(jax.tree.leaves(arguments))}

    def replace(x: Any) -> Any:
        return _Argument(index_of[id(x)]) if id(x) in index_of else x

    return jax.tree.map(replace, vjp)


def _with_arguments(vjp: Any, arguments: Any) -> Any:
    """Return what `_without_arguments` was given, with the arguments put back."""
    arrays = jax.tree.leaves(arguments)

    def restore(x: Any) -> Any:
        return arrays[x.index] if isinstance(x, _Argument) else x

    return jax.tree.map(restore, vjp, is_leaf=lambda x: isinstance(x, _Argument))


@dataclass(frozen=True)
class _LayerScan:
    """A scan over released layers, and its derivative, which steps them.

    Attributes:
        block: from a carry, weights, other slices and constants to a carry and outputs.
        results: descriptions of what the block returns.
        settings: of `lax.scan`.
    """

    block: Callable[..., Any]
    results: Any
    settings: dict[str, Any]

    def forward(self, released: Any, carry: Any, others: Any, consts: Any) -> Any:
        """Return the results of the scan, and what its derivative needs."""
        steppers = [x.stepper for x in released]

        def body(carry: Any, slices: Any) -> Any:
            layers, others = slices
            weights = list(map(_layers.Stepper.in_rows, steppers, layers))
            arguments = weights, others, consts
            (after, outputs), vjp = jax.vjp(self.block, carry, *arguments)
            return after, (outputs, _without_arguments(vjp, arguments))

        layers = [x.layers for x in released]
        carry, (ys, vjps) = lax.scan(body, carry, (layers, others), **self.settings)
        return (carry, ys), (released, vjps, others, consts)

    def backward(self, kept: Any, cotangents: Any) -> Any:
        """Return the layers after their steps, and the gradients of all else."""
        released, vjps, others, consts = kept
        steppers, factors = [x.stepper for x in released], [x.factor for x in released]
        of_carry, of_outputs = only_inexact(cotangents)

        def body(loop_carry: Any, slices: Any) -> Any:
            of_carry, totals, layers, states = loop_carry
            i, vjp, others, of_outputs = slices
            # If gradients are only measured, no layers are carried.
            now = [y if x is None else x for x, y in zip(layers, old, strict=True)]
            weights, own_states = layer_at((now, states), i)
            used = list(map(_layers.Stepper.in_rows, steppers, weights))
            vjp = _with_arguments(vjp, (used, others, consts))
            of_carry, grads, of_others, of_consts = only_inexact(
                vjp(jax.tree.map(_or_float0, self.results, (of_carry, of_outputs)))
            )
            args = steppers, grads, _arrays.to_device_tree(own_states), weights, factors
            stepped = list(map(_layers.Stepper.step, *args))
            new = [layer for layer, _ in stepped], [state for _, state in stepped]
            # Layers and states are carried, and so overwritten in place: as outputs of
            # the loop they would exist twice.
            layers, states = _with_layer((layers, states), new, i)
            totals = jax.tree.map(jnp.add, totals, of_consts)
            return (of_carry, totals, layers, states), of_others

        old = [x.layers for x in released]
        layers = [None if x.measures else y for x, y in zip(steppers, old, strict=True)]
        states = [x.opt_state for x in released]
        totals = jax.tree.map(jnp.zeros_like, only_inexact(consts))
        # The first layer that the block passed comes last.
        backward = self.settings | {"reverse": not self.settings["reverse"]}
        (of_carry, totals, layers, states), of_others = lax.scan(
            body,
            (of_carry, totals, layers, states),
            (jnp.arange(len(jax.tree.leaves(old)[0])), vjps, others, of_outputs),
            **backward,
        )
        for stepper in steppers:
            stepper.is_used = True
        # To JAX, these are the gradients of `released`. The factor has none.
        stepped = [
            _layers.ReleasedLayers.of(*parts, factor=None)
            for parts in zip(layers, states, steppers, strict=True)
        ]
        return stepped, of_carry, of_others, totals


def _or_float0(result: Any, cotangent: Any) -> Any:
    """Return a cotangent, or the zero that JAX wants for a result without one."""
    if cotangent is None:
        return np.zeros(np.shape(result), jax.dtypes.float0)
    return cotangent
