"""release_gradients: a loss, its gradients, and a step of each layer, in one."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from optax_mp._inner import as_transformation
from optax_mp._tree import spell, summarize
from optax_mp.leafwise._layout import spread_shardings
from optax_mp.release._check import CALLER, check_arguments, scanning_once
from optax_mp.release._scan import ReleasedLayers, Stack, is_released, kind_of
from optax_mp.scaling._gradients import differentiate, widen_gradients


def release_gradients(
    fun: Callable[..., Any],
    tx: Any,
    *,
    has_aux: bool = False,
    by_layer: bool = False,
    param_shardings: Any = None,
) -> Callable[..., Any]:
    """Return `f(opt_state, layers, rest, ...) -> (value, grads, layers, opt_state)`.

    The backward pass takes the step of each layer as soon as it has the layer's
    gradient, which then is freed. So the gradients of stacked layers never exist as a
    whole, and a compact form trains at 5.1 bytes per weight, gradients included.

    `fun(layers, rest, ...)` is a loss that scans the layers with `scan_layers`. `f`
    returns its value, the gradients of `rest`, which holds all other params, and
    `layers` and `opt_state` after one step. The step of `rest` is yours. `f` does
    what `optax_mp.value_and_grad` and `tx.update` on each layer do. Call `f` under
    `jax.jit`, and donate state and layers to overwrite them.

    Each layer has a state of its own: `opt_state = jax.vmap(tx.init)(layers)`. It may
    be in host memory, and is then copied layer by layer:
    `jax.vmap(optax_mp.offload(tx).init)(layers)`. Optimizers that need the gradients of
    all layers, such as `optax.clip_by_global_norm`, are found in a trace of
    `tx.update`, and refused.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`. It
            scans `layers` once, and can do nothing else with this argument.
        tx: any optax optimizer that updates each array by itself. For several stacks of
            layers a tree of optimizers, such as a dict; `layers`, `opt_state` and
            `param_shardings` have one subtree for each, and `fun` scans each of these.
        has_aux: whether `fun` also returns auxiliary data.
        by_layer: whether `tx` may compute something over all arrays of a layer, such as
            a norm. It then does so for each layer.
        param_shardings: how `layers` are sharded under `jit`, a tree of shardings like
            them or a prefix of one. Pass it if a last axis is sharded on GPUs, where
            XLA may otherwise transpose all layers; and for kernels, as in `take_step`.

    Returns:
        The function. With `has_aux` its value is (loss, aux).

    Raises:
        TypeError: if `tx` is no optimizer.
        ValueError: when called, if `tx` needs the gradients of all layers; if it
            changes the dtype of its state; if `opt_state` is not stacked as the layers
            are; if the layers are not scanned exactly once, or the loss does not depend
            on them.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> def loss(layers, rest, x):
        ...     def block(x, w):
        ...         return x + jnp.tanh(x @ w), None
        ...     x, _ = optax_mp.scan_layers(block, x * rest, layers)
        ...     return jnp.mean(x**2)
        >>> tx = optax.adamw(0.1)
        >>> layers, rest = jnp.zeros((4, 3, 3)), jnp.ones(3)
        >>> opt_state = jax.vmap(tx.init)(layers)
        >>> step = jax.jit(optax_mp.release_gradients(loss, tx), donate_argnums=(0, 1))
        >>> value, grads, layers, opt_state = step(
        ...     opt_state, layers, rest, jnp.ones((2, 3))
        ... )
        >>> float(value), layers.shape, bool((layers != 0).all())
        (1.0, (4, 3, 3), True)
    """
    if not callable(fun):
        raise TypeError(
            f"{CALLER}: expected `fun` to be a function, got {summarize(fun)}; call "
            "it as `release_gradients(loss, tx)`."
        )
    txs = jax.tree.map(
        lambda x: as_transformation(x, CALLER, "tx"), tx, is_leaf=_is_optimizer
    )

    def release(tx: Any, opt_state: Any, layers: Any, shardings: Any) -> ReleasedLayers:
        check_arguments(tx, opt_state, layers, by_layer=by_layer)
        kinds = jax.tree.map(kind_of, (layers, opt_state))
        stack = Stack(tx, kinds, _of_layer(layers, shardings))
        return ReleasedLayers.of(layers, opt_state, stack)

    def run(opt_state: Any, layers: Any, *args: Any, **kwargs: Any) -> Any:
        shardings = param_shardings
        if shardings is None:
            shardings = jax.tree.map(lambda _: None, txs, is_leaf=_is_optimizer)
        trees = txs, opt_state, layers, shardings
        released = jax.tree.map(release, *trees, is_leaf=_is_optimizer)
        loss, given = scanning_once(fun), (released, *args)
        value, (stepped, grads) = differentiate(
            loss, (0, 1), has_aux, None, given, kwargs, CALLER, widen=False
        )
        for path, x in tree_leaves_with_path(released, is_leaf=is_released):
            if not x.stack.is_stepped:
                raise ValueError(
                    f"{CALLER}: expected a loss of what `scan_layers` returns, got "
                    f"one that does not depend on the layers {spell(path)}, so that no "
                    "step would be taken; remove `jax.lax.stop_gradient`."
                )
        layers, opt_state = (
            jax.tree.map(get, stepped, is_leaf=is_released)
            for get in (attrgetter("layers"), attrgetter("opt_state"))
        )
        return value, widen_gradients(grads), layers, opt_state

    return run


def _is_optimizer(x: Any) -> bool:
    return isinstance(x, optax.GradientTransformation | optax.MultiSteps)


def _of_layer(layers: Any, shardings: Any) -> Any:
    """Return the sharding of the arrays of one layer, or None if it is not known."""
    if shardings is None:
        return None
    spread = spread_shardings(layers, shardings, CALLER)
    return jax.tree.unflatten(
        jax.tree.structure(layers),
        [x and NamedSharding(x.mesh, PartitionSpec(*x.spec[1:])) for x in spread],
    )
