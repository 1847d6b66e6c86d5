"""release_gradients: a loss, its gradients, and a step of each layer, in one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp.core.jax_api._arrays import is_array
from optax_mp.core.jax_api._jaxpr import TracedCall, evaluate
from optax_mp.core.scaling._gradients import gradients_of
from optax_mp.core.scaling._rule import check_number
from optax_mp.core.trees._tree import in_float32
from optax_mp.core.wrappers._mistakes import refuse_overwritten
from optax_mp.core.wrappers._protocol import as_transformation
from optax_mp.release import _checks, _layers


def release_gradients(
    fun: Callable[..., Any],
    tx: Any,
    *,
    has_aux: bool = False,
    max_norm: Any = None,
    by_layer: bool = False,
    param_shardings: Any = None,
) -> Callable[..., Any]:
    """Return `f(opt_state, layers, rest, ...) -> (value, grads, layers, opt_state)`.

    The backward pass takes the step of each layer as soon as it has the layer's
    gradient, and then frees the gradient. So the gradients of all layers never exist at
    once, and a compact form trains in 5.0 bytes per weight plus the gradients of one
    layer.

    `fun(layers, rest, ...)` is a loss that scans the layers with `scan_layers`. `f`
    returns its value, the gradients of `rest`, which holds all other params, and
    `layers` and `opt_state` after one step. The step of `rest` is yours. `f` does
    what `optax_mp.value_and_grad` and `tx.update` on each layer do. Call `f` under
    `jax.jit`, and donate state and layers to overwrite them.

    Each layer has its own state: `opt_state = jax.vmap(tx.init)(layers)`. It may
    be in host memory, and is then copied layer by layer:
    `jax.vmap(optax_mp.offload(tx).init)(layers)`. Optimizers that need the gradients of
    all layers are found in a trace of `tx.update`, and refused.

    A step has one loss scale. Put it around the optimizer of `rest`, not in `tx`, and
    pass the state: `f(opt_state, layers, rest, ..., rest_state=rest_state)`. If a
    gradient is not finite, all layers and `rest` skip the step together, as with
    `optax.apply_if_finite` around both optimizers.

    `max_norm`, a loss scale and `optax.apply_if_finite` take 1.65 times the products
    of a step, because the gradients are computed twice: the first pass measures and
    frees them, the second takes the steps. The gradients of `rest` are clipped, NaN in
    a skipped step, and still scaled.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`. It
            scans `layers` once, and can do nothing else with this argument.
        tx: any optax optimizer that updates each array by itself. For several stacks of
            layers, pass a tree of optimizers, such as a dict; `layers`, `opt_state` and
            `param_shardings` have one subtree for each, and `fun` scans each of these.
        has_aux: whether `fun` also returns auxiliary data.
        max_norm: clip by the norm of all gradients, of all layers and `rest`, as
            `optax.clip_by_global_norm(max_norm)` does. `tx` must not clip as well.
        by_layer: whether `tx` may compute something over all arrays of a layer, such as
            a norm. It then does so for each layer.
        param_shardings: how `layers` are sharded under `jit`, a tree of shardings like
            them or a prefix of one. Pass it if a last axis is sharded on GPUs, where
            XLA may otherwise transpose all layers.

    Returns:
        The function. With `has_aux` its value is (loss, aux). Pass `rest_state` by
        keyword; other keywords are passed to `fun`.

    Raises:
        TypeError: if `tx` is not an optimizer; when called, if the loss reads the
            layers without `scan_layers`; from JAX, if `tx` changes the dtype of its
            state, as it does for 16-bit layers without `mixed_precision`.
        ValueError: when called, if `tx` needs the gradients of all layers; if
            `opt_state` is not stacked as the layers are; if `tx` has a loss scale; if
            the layers are not scanned exactly once, or the loss does not depend on
            them; within `jax.pmap` or `jax.shard_map(check_vma=False)`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> def loss(layers, rest, x):
        ...     def block(x, layer):
        ...         return x + jnp.tanh(x @ layer["w"]), None
        ...     x, _ = optax_mp.scan_layers(block, x * rest, layers)
        ...     return jnp.mean(x**2)
        >>> tx = optax.adamw(0.1)
        >>> layers, rest = {"w": jnp.zeros((4, 3, 3))}, jnp.ones(3)
        >>> opt_state = jax.vmap(tx.init)(layers)
        >>> step = jax.jit(optax_mp.release_gradients(loss, tx), donate_argnums=(0, 1))
        >>> value, grads, layers, opt_state = step(
        ...     opt_state, layers, rest, jnp.ones((2, 3))
        ... )
        >>> float(value), layers["w"].shape, bool((layers["w"] != 0).all())
        (1.0, (4, 3, 3), True)
    """
    txs, treedef = _check_optimizers(tx)
    if max_norm is not None and not is_array(max_norm):
        expected = "a positive number"
        check_number(
            f"{_checks.CALLER}: `max_norm`", max_norm, expected, lambda x: x > 0
        )

    def checked_loss(released: Any, *args: Any, **kwargs: Any) -> Any:
        given = (released, *args), kwargs
        traced = TracedCall.of(lambda x: fun(*x[0], **x[1]), given)
        _checks.check_scans(traced.closed, released)
        return traced.unflatten(evaluate(traced.closed, traced.arrays))

    differentiate = gradients_of(checked_loss, (0, 1), has_aux, _checks.CALLER)

    def run(
        opt_state: Any, layers: Any, *args: Any, rest_state: Any = None, **kwargs: Any
    ) -> Any:
        refuse_overwritten((layers, *args[:1]), _checks.CALLER)
        _checks.check_ranks()
        _checks.check_scans_have_gradients()
        stacks = _stacks_of(txs, treedef, opt_state, layers, param_shardings)
        scale = _checks.scale_of_step(rest_state, args[0] if args else None)
        is_scaled = scale is not None
        skips = is_scaled | _checks.check_skips(
            [
                _checks.check_stack(x, is_scaled=is_scaled, by_layer=by_layer)
                for x in stacks
            ]
        )

        def differentiate_once(factor: Any, *, measures: bool = False) -> Any:
            """Return the value, each stack after the pass, and gradients of `rest`."""
            parts = [
                _layers.release(x, factor, measures=measures, skips=is_scaled)
                for x in stacks
            ]
            released = treedef.unflatten(parts)
            value, (after, grads) = differentiate(scale, (released, *args), kwargs)
            _checks.check_steps(released)
            return value, treedef.flatten_up_to(after), in_float32(grads)

        factor = of_layers = None
        if skips or max_norm is not None:
            # The first of two passes writes no layers. It frees the gradient of each as
            # soon as two numbers are taken of it.
            unscale = None if scale is None else 1 / scale
            _, measured, grads = differentiate_once(unscale, measures=True)
            sums = [x.opt_state.sum(0) for x in measured]
            squares, bad_count = sum(
                sums, _layers.measure(_layers.times(grads, unscale))
            )
            norm, is_bad = jnp.sqrt(squares), bad_count != 0
            # As `optax.clip_by_global_norm`, with its results for infinity and NaN.
            factor = jnp.float32(1.0)
            if max_norm is not None:
                factor = jnp.minimum(factor, max_norm / norm)
            # A step is skipped by all layers or by none: where one has a NaN, all get
            # one, and the caller's step of `rest` as well.
            factor = jnp.where(skips & is_bad, jnp.nan, factor)
            of_layers = factor if unscale is None else factor * unscale
        value, stepped, grads = differentiate_once(of_layers)
        layers = treedef.unflatten([x.layers for x in stepped])
        opt_state = treedef.unflatten([x.opt_state for x in stepped])
        return value, _layers.times(grads, factor), layers, opt_state

    return run


def _check_optimizers(tx: Any) -> tuple[list[Any], Any]:
    """Return the optimizers in a tree, and its structure, or raise."""
    kinds = optax.GradientTransformation | optax.MultiSteps
    txs, treedef = jax.tree.flatten(tx, is_leaf=lambda x: isinstance(x, kinds))
    if not txs:
        raise TypeError(
            f"{_checks.CALLER}: expected `tx` to be an optax gradient transformation, "
            f"or a tree with one for each stack of layers, got {tx!r}; pass an "
            "optimizer."
        )
    return [as_transformation(x, _checks.CALLER, "tx") for x in txs], treedef


def _stacks_of(txs: Any, treedef: Any, *trees: Any) -> list[_layers.Stack]:
    """Return each optimizer with its parts of the state, the layers and shardings."""
    count = treedef.num_leaves
    try:
        parts = [[x] * count if x is None else treedef.flatten_up_to(x) for x in trees]
    except ValueError as error:
        raise ValueError(
            f"{_checks.CALLER}: expected `opt_state` and `layers` with a part for each "
            f"of the {count} optimizers of `tx`; for several optimizers in one stack "
            f"use `optax.partition`. JAX says: {error}"
        ) from error
    return list(map(_layers.Stack, txs, *parts))
