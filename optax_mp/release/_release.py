"""release_gradients: a loss, its gradients, and a step of each layer, in one.

States, optimizers and losses that do not fit are refused.
"""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from optax_mp._arguments import check_state_first
from optax_mp._descriptions import spread_shardings
from optax_mp._dtypes import bits
from optax_mp._inner import as_transformation
from optax_mp._jax._dataflow import Origin, derivative_calls, origins
from optax_mp._jax._jaxpr import evaluate
from optax_mp._jax._memory import bring
from optax_mp._jax._traced import TracedCall
from optax_mp._states import find_states
from optax_mp._tree import (
    describe,
    in_float32,
    is_array,
    only_inexact,
    spell,
    summarize,
)
from optax_mp._warnings import warn
from optax_mp.release._scan import ReleasedLayers, Stack, is_released, kind_of, layer_at
from optax_mp.scaling._gradients import differentiate
from optax_mp.scaling._state import LossScaleState

_CALLER = "release_gradients"
# States of transformations that need more than the gradients of one layer, and why.
_REFUSED = {
    LossScaleState: "a loss scale, which needs all gradients; train in bfloat16",
    optax.MultiStepsState: "`optax.MultiSteps`, which keeps all gradients; use a larger"
    " batch, with `jax.checkpoint` in the block",
}


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
            f"{_CALLER}: expected `fun` to be a function, got {summarize(fun)}; call "
            "it as `release_gradients(loss, tx)`."
        )
    txs = jax.tree.map(
        lambda x: as_transformation(x, _CALLER, "tx"), tx, is_leaf=_is_optimizer
    )

    def release(tx: Any, opt_state: Any, layers: Any, shardings: Any) -> ReleasedLayers:
        _check_arguments(tx, opt_state, layers, by_layer=by_layer)
        kinds = jax.tree.map(kind_of, (layers, opt_state))
        stack = Stack(tx, kinds, _of_layer(layers, shardings))
        return ReleasedLayers.of(layers, opt_state, stack)

    def run(opt_state: Any, layers: Any, *args: Any, **kwargs: Any) -> Any:
        shardings = param_shardings
        if shardings is None:
            shardings = jax.tree.map(lambda _: None, txs, is_leaf=_is_optimizer)
        trees = txs, opt_state, layers, shardings
        released = jax.tree.map(release, *trees, is_leaf=_is_optimizer)
        loss, given = _scanning_once(fun), (released, *args)
        value, (stepped, grads) = differentiate(
            loss, (0, 1), has_aux, None, given, kwargs, _CALLER
        )
        for path, x in tree_leaves_with_path(released, is_leaf=is_released):
            if not x.stack.is_stepped:
                raise ValueError(
                    f"{_CALLER}: expected a loss of what `scan_layers` returns, got "
                    f"one that does not depend on the layers {spell(path)}, so that no "
                    "step would be taken; remove `jax.lax.stop_gradient`."
                )
        layers, opt_state = (
            jax.tree.map(get, stepped, is_leaf=is_released)
            for get in (attrgetter("layers"), attrgetter("opt_state"))
        )
        return value, in_float32(grads), layers, opt_state

    return run


def _is_optimizer(x: Any) -> bool:
    return isinstance(x, optax.GradientTransformation | optax.MultiSteps)


def _of_layer(layers: Any, shardings: Any) -> Any:
    """Return the sharding of the arrays of one layer, or None if it is not known."""
    if shardings is None:
        return None
    spread = spread_shardings(layers, shardings, _CALLER)
    return jax.tree.unflatten(
        jax.tree.structure(layers),
        [x and NamedSharding(x.mesh, PartitionSpec(*x.spec[1:])) for x in spread],
    )


def _check_arguments(tx: Any, opt_state: Any, layers: Any, *, by_layer: bool) -> None:
    """Raise unless layers, their state and their optimizer fit together."""
    call = "release_gradients(loss, tx)(opt_state, layers, rest, ...)"
    check_state_first(opt_state, layers, _CALLER, call)
    _check_layers(layers)
    if getattr(tx, "offloaded", None):
        raise ValueError(
            f"{_CALLER}: expected the optimizer inside of `offload` as `tx`, got the "
            "`offload`; pass `tx` without it, and a state in host memory, as "
            "`jax.vmap(optax_mp.offload(tx).init)(layers)` makes it."
        )
    wanted = jax.eval_shape(jax.vmap(tx.init), layers)
    for kind, problem in _REFUSED.items():
        if find_states(wanted, kind):
            raise ValueError(f"{_CALLER}: `tx` has {problem}; or take a separate step.")
    _check_state(wanted, opt_state, "`opt_state`", "pass `jax.vmap(tx.init)(layers)`")
    traced = _trace_update(tx, opt_state, layers)
    before, after = jax.eval_shape(lambda: layer_at(opt_state, 0)), traced[1][1]
    remedy = "wrap `tx` in `mixed_precision`"
    _check_state(before, after, "the state after `tx.update`", remedy)
    if by_layer:
        return
    if len(jax.tree.leaves(layers)) == 1:
        # The norm of a single array cannot be told from the norm of all.
        layers = jax.tree.map(lambda x: [x, x], layers)
        try:
            opt_state = jax.eval_shape(jax.vmap(tx.init), layers)
            traced = _trace_update(tx, opt_state, layers)
        except Exception:  # of any type: a mask, say, knows this tree alone
            warn(
                f"{_CALLER}: `layers` is a single array, and `tx` does not work for "
                "another tree, so that a norm of all arrays would not be found. If the "
                "step of each layer needs only its own gradient, pass `by_layer=True`."
            )
            return
    _check_leafwise(tx, traced, layers)


def _check_layers(layers: Any) -> None:
    """Raise unless all arrays have the same leading axis."""
    leaves = tree_leaves_with_path(layers)
    count = next((x.shape[0] for _, x in leaves if getattr(x, "ndim", 0)), None)
    if not count:
        raise ValueError(
            f"{_CALLER}: expected one layer or more, got `layers` with "
            f"{'no arrays' if count is None else 'leading axes of 0'}; train a model "
            "without layers by a separate step."
        )
    for path, x in leaves:
        if not is_array(x) or x.shape[:1] != (count,):
            raise ValueError(
                f"{_CALLER}: expected `layers` at {spell(path)} to be an array with a "
                f"leading axis of {count} layers, got {describe(x)}; stack the arrays "
                "of all layers, and pass all else in `rest`."
            )
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended) and bits(x.dtype) < 8:  # noqa: PLR2004
            raise ValueError(
                f"{_CALLER}: expected `layers` at {spell(path)} in 8 bits or more, got "
                f"{describe(x)}; pass it beside the layers, `scan_layers(block, carry, "
                "(layers, x))`."
            )
        if x.dtype == np.float16:
            warn(
                f"{_CALLER}: `layers` at {spell(path)} is {describe(x)}. In float16, "
                "gradients below 6e-8 become 0, and a release takes no loss scale; use "
                "bfloat16."
            )


def _check_state(wanted: Any, given: Any, name: str, remedy: str) -> None:
    """Raise unless a state has arrays of the wanted shapes and dtypes."""
    leaves, others = map(tree_leaves_with_path, (wanted, given))
    if len(leaves) != len(others):
        raise ValueError(
            f"{_CALLER}: expected {name} to have {len(leaves)} arrays, got "
            f"{len(others)}; {remedy}."
        )
    for (path, want), (_, x) in zip(leaves, others, strict=True):
        if describe(x) != describe(want):
            raise ValueError(
                f"{_CALLER}: expected {name} at {spell(path)} to be {describe(want)}, "
                f"got {describe(x)}; {remedy}."
            )


def _trace_update(tx: Any, opt_state: Any, layers: Any) -> tuple[Any, Any]:
    """Return the jaxpr of the update of one layer, and what it returns."""

    def update(opt_state: Any, layers: Any) -> Any:
        weights = layer_at(layers, 0)
        grads, state = in_float32(only_inexact(weights)), layer_at(opt_state, 0)
        return tx.update(grads, bring(state), weights)

    try:
        return jax.make_jaxpr(update, return_shape=True)(opt_state, layers)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{_CALLER}: expected an optimizer that needs nothing but gradients and "
            "params, because no layer has a loss of its own, got one whose `tx.update("
            "grads, opt_state, params)` fails for one layer; take a separate step. It "
            f"raised {type(error).__name__}: {error}"
        ) from error


def _check_leafwise(tx: Any, traced: Any, layers: Any) -> None:
    """Raise if the update of an array depends on another array of the params.

    Args:
        tx: the optimizer.
        traced: what `_trace_update` returns.
        layers: the layers.
    """
    update, (updates, _) = traced
    paths = [path for path, _ in tree_leaves_with_path(layers)]
    of_layers = [Origin(frozenset({i})) for i in range(len(paths))]
    of_state = origins(jax.make_jaxpr(jax.vmap(tx.init))(layers), of_layers)
    count = len(jax.tree.leaves(updates))
    found, before = [], None
    while of_state != before:
        found, before = origins(update, [*of_state, *of_layers]), of_state
        # In the next step, the state is computed from what this one was given.
        of_state = list(map(lambda *x: Origin.join(x), before, found[count:]))
    for origin in found[:count]:
        if len(origin.groups) > 1:
            first, second, *_ = (spell(paths[i]) for i in sorted(origin.groups))
            raise ValueError(
                f"{_CALLER}: expected `tx` to update each array by itself, because no "
                "layer's step waits for the gradients of the others, got an update of "
                f"several params, such as {first} and {second}, in {origin.joined_in}; "
                "clip each array by `optax.clip_by_block_rms` or "
                "`optax.adaptive_grad_clip`; or pass `by_layer=True`, to compute it "
                "over the arrays of each layer alone."
            )


def _scanning_once(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that raises unless it scans each stack of its layers once."""

    def run(released: Any, *args: Any, **kwargs: Any) -> Any:
        traced = TracedCall.of(
            lambda x: fun(*x[0], **x[1]), ((released, *args), kwargs)
        )
        first = 0
        for path, x in tree_leaves_with_path(released, is_leaf=is_released):
            places = range(first, first := first + len(jax.tree.leaves(x)))
            times = {derivative_calls(traced.closed, place) for place in places}
            if times != {1}:
                raise ValueError(
                    f"{_CALLER}: expected a loss that passes the layers {spell(path)} "
                    f"unchanged to one `scan_layers`, got one that {_use(times)}; cast "
                    "and regularize them in the block, keep the scan out of loops and "
                    "branches, because it takes a step, and average over micro-batches "
                    "with a larger batch and `jax.checkpoint`."
                )
        return traced.unflatten(evaluate(traced.closed, traced.arrays))

    return run


def _use(times: set[float]) -> str:
    """Say how a loss uses layers that it should scan once."""
    if any(map(math.isnan, times)):
        return "reads or changes them outside of it"
    most = max(times)
    return f"scans them {'several' if math.isinf(most) else f'{most:g}'} times"
