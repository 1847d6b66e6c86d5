"""release_gradients: a loss, its gradients, and a step of each layer, in one."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from optax_mp._arguments import check_opt_state
from optax_mp._inner import as_transformation
from optax_mp._jax._dataflow import Origin, origins, run_reads
from optax_mp._jax._jaxpr import evaluate
from optax_mp._jax._traced import TracedCall
from optax_mp._states import find_states
from optax_mp._tree import describe, is_array, is_inexact, spell
from optax_mp._warnings import warn
from optax_mp.leafwise._layout import spread_shardings
from optax_mp.release._scan import ReleasedLayers, Stack, as_differentiated
from optax_mp.scaling._gradients import check_function, differentiate
from optax_mp.scaling._state import LossScaleState

_CALLER = "release_gradients"
# States of transformations that need more than the gradients of one layer, and why.
_REFUSED = {
    LossScaleState: (
        "a loss scale, which takes or skips the step of all layers once all gradients "
        "are known; train in bfloat16, which needs none"
    ),
    optax.MultiStepsState: (
        "`optax.MultiSteps`, which keeps a sum of the gradients that are released; "
        "use a larger batch, with `jax.checkpoint` in the block"
    ),
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
    whole, and a compact form trains at 5.1 bytes per weight with them.

    `fun(layers, rest, ...)` is a loss that scans the layers with `scan_layers`. `f`
    returns its value, the gradients of `rest`, which holds all other params, and
    `layers` and `opt_state` after one step. The step of `rest` is yours. All are what
    `optax_mp.value_and_grad`, and `tx.update` on each layer, give. Call `f` under
    `jax.jit`, and donate state and layers to overwrite them.

    Each layer has a state of its own: `opt_state = jax.vmap(tx.init)(layers)`. What
    needs the gradients of all layers, such as `optax.clip_by_global_norm`, is found in
    a trace of `tx.update`, and refused.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`. It
            scans `layers` once. What it gets as `layers` is only for `scan_layers`.
        tx: any optax optimizer that updates each array by itself. For several stacks of
            layers a tree of optimizers, such as a dict; `layers`, `opt_state` and
            `param_shardings` have one subtree for each, and `fun` scans each of these.
        has_aux: whether `fun` returns auxiliary data, too.
        by_layer: whether `tx` may compute something over all arrays of a layer, such as
            a norm. It then does so for each layer.
        param_shardings: how `layers` are sharded under `jit`, a tree of shardings like
            them or a prefix of one. Pass it if a last axis is sharded on GPUs, where
            XLA otherwise transposes all layers; and for kernels, as in `take_step`.

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
    check_function(fun, (), has_aux, _CALLER)
    txs = jax.tree.map(
        lambda x: as_transformation(x, _CALLER, "tx"), tx, is_leaf=_is_optimizer
    )

    def run(opt_state: Any, layers: Any, *args: Any, **kwargs: Any) -> Any:
        def stack(tx: Any, opt_state: Any, layers: Any, shardings: Any) -> Stack:
            _check_arguments(tx, opt_state, layers, by_layer=by_layer)
            return Stack(tx, layers, opt_state, _of_layer(layers, shardings))

        shardings = param_shardings
        if shardings is None:
            shardings = jax.tree.map(lambda _: None, txs, is_leaf=_is_optimizer)
        trees = txs, opt_state, layers, shardings
        stacks = jax.tree.map(stack, *trees, is_leaf=_is_optimizer)
        released = jax.tree.map(lambda x: ReleasedLayers(jnp.zeros(()), x), stacks)
        value, (_, grads) = differentiate(
            _scanning_once(fun),
            (0, 1),
            has_aux,
            None,
            (released, *args),
            kwargs,
            _CALLER,
        )
        for path, x in tree_leaves_with_path(stacks):
            if not x.is_stepped:
                raise ValueError(
                    f"{_CALLER}: the loss does not depend on the layers {spell(path)}, "
                    "so that no step would be taken, expected a loss of what "
                    "`scan_layers` returns; remove `jax.lax.stop_gradient`."
                )
        results = jax.tree.map(Stack.result, stacks)
        layers = jax.tree.map(lambda _, pair: pair[0], stacks, results)
        opt_state = jax.tree.map(lambda _, pair: pair[1], stacks, results)
        return value, grads, layers, opt_state

    return run


def _is_optimizer(x: Any) -> bool:
    return isinstance(x, optax.GradientTransformation | optax.MultiSteps)


def _scanning_once(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that raises unless it scans each stack of its layers once."""

    def run(released: Any, *args: Any, **kwargs: Any) -> Any:
        traced = TracedCall.of(
            lambda x: fun(*x[0], **x[1]), ((released, *args), kwargs)
        )
        # The tokens come first.
        for at, (path, _) in enumerate(tree_leaves_with_path(released)):
            inputs = [i == at for i in range(len(traced.arrays))]
            times = run_reads(traced.closed, inputs)
            if times != 1:
                shown = "several times" if math.isinf(times) else f"{times:g} times"
                raise ValueError(
                    f"{_CALLER}: the loss scans the layers {spell(path[:-1])} {shown}, "
                    "expected once, because each scan takes a step; scan them by "
                    "`scan_layers` outside of loops and branches, and average over "
                    "micro-batches with a larger batch and `jax.checkpoint`."
                )
        return traced.unflatten(evaluate(traced.closed, traced.arrays))

    return run


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
    check_opt_state(opt_state, _CALLER)
    one = _describe_layer(layers)
    grads = jax.eval_shape(as_differentiated, one)
    state = jax.eval_shape(tx.init, one)
    for kind, problem in _REFUSED.items():
        if find_states(state, kind):
            raise ValueError(f"{_CALLER}: `tx` has {problem}; or take a separate step.")
    count = jax.tree.leaves(layers)[0].shape[0]
    wanted = jax.tree.map(lambda x: _like(x, (count, *x.shape)), state)
    _check_state(wanted, opt_state, "`opt_state`", "pass `jax.vmap(tx.init)(layers)`")
    _, after = jax.eval_shape(tx.update, grads, state, one)
    _check_state(
        state, after, "the state after `tx.update`", "wrap `tx` in `mixed_precision`"
    )
    if not by_layer:
        _check_leafwise(tx, one)


def _like(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _describe_layer(layers: Any) -> Any:
    """Return descriptions of the arrays of one layer, or raise."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(layers)
    count = next((x.shape[0] for _, x in leaves if getattr(x, "ndim", 0)), None)
    for path, x in leaves:
        if not is_array(x) or x.shape[:1] != (count,):
            raise ValueError(
                f"{_CALLER}: `layers`{jax.tree_util.keystr(path)} is {describe(x)}, "
                f"expected an array with a leading axis of {count} layers; stack the "
                "arrays of all layers, and pass all else in `rest`."
            )
        if x.dtype == jnp.float16:
            warn(
                f"{_CALLER}: `layers`{jax.tree_util.keystr(path)} is {describe(x)}. In "
                "float16, gradients below 6e-8 become 0, and a release takes no loss "
                "scale; use bfloat16."
            )
    return treedef.unflatten([_like(x, x.shape[1:]) for _, x in leaves])


def _check_state(wanted: Any, given: Any, name: str, remedy: str) -> None:
    """Raise unless a state has arrays of the wanted shapes and dtypes."""
    leaves = tree_leaves_with_path(wanted)
    others = tree_leaves_with_path(given)
    if len(leaves) != len(others):
        raise ValueError(
            f"{_CALLER}: {name} has {len(others)} arrays, expected {len(leaves)}; "
            f"{remedy}."
        )
    for (path, want), (_, x) in zip(leaves, others, strict=True):
        if describe(x) != describe(want):
            raise ValueError(
                f"{_CALLER}: {name} at {spell(path)} is {describe(x)}, expected "
                f"{describe(want)}; {remedy}."
            )


def _check_leafwise(tx: Any, one: Any) -> None:
    """Raise if the update of an array depends on another array of the params."""
    if len(jax.tree.leaves(one)) == 1:
        # With a single array, a norm of it cannot be told from a norm of all.
        one = jax.tree.map(lambda x: [x, x], one)
    paths = [path for path, _ in tree_leaves_with_path(one)]
    grads = jax.eval_shape(as_differentiated, one)
    state = jax.eval_shape(tx.init, one)
    traced = jax.make_jaxpr(tx.update, return_shape=True)(grads, state, one)
    update, (updates, _) = traced
    of_params = [Origin(frozenset({i})) for i in range(len(paths))]
    of_grads = [
        x for x, p in zip(of_params, jax.tree.leaves(one), strict=True) if is_inexact(p)
    ]
    of_state = origins(jax.make_jaxpr(tx.init)(one), of_params)
    count = len(jax.tree.leaves(updates))
    while True:
        found = origins(update, [*of_grads, *of_state, *of_params])
        # In the next step, the state is computed from what this one was given.
        later = [
            Origin(x.groups | y.groups, x.joined_in or y.joined_in)
            for x, y in zip(of_state, found[count:], strict=True)
        ]
        if later == of_state:
            break
        of_state = later
    for origin in found[:count]:
        if len(origin.groups) > 1:
            first, second, *_ = (spell(paths[i]) for i in sorted(origin.groups))
            raise ValueError(
                f"{_CALLER}: `tx` computes an update from several params, such as "
                f"{first} and {second}, in {origin.joined_in}, expected an update of "
                "each array by itself, because no layer's gradient waits for those of "
                "the others. Clip each array by `optax.clip_by_block_rms` or "
                "`optax.adaptive_grad_clip`; or pass `by_layer=True`, to compute it "
                "over the arrays of each layer alone."
            )
