"""What gradient release refuses: states, optimizers and losses that do not fit."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp._arguments import check_state_first
from optax_mp._dtypes import bits
from optax_mp._jax._dataflow import Origin, derivative_calls, origins
from optax_mp._jax._jaxpr import evaluate
from optax_mp._jax._memory import bring
from optax_mp._jax._traced import TracedCall
from optax_mp._states import find_states
from optax_mp._tree import describe, is_array, is_inexact, spell
from optax_mp._warnings import warn
from optax_mp.release._scan import is_released, layer_at
from optax_mp.scaling._gradients import widen_gradients
from optax_mp.scaling._state import LossScaleState

CALLER = "release_gradients"
_CALL = "release_gradients(loss, tx)(opt_state, layers, rest, ...)"
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


def check_arguments(tx: Any, opt_state: Any, layers: Any, *, by_layer: bool) -> None:
    """Raise unless layers, their state and their optimizer fit together."""
    check_state_first(opt_state, layers, CALLER, _CALL)
    _check_layers(layers)
    if getattr(tx, "offloaded", None):
        raise ValueError(
            f"{CALLER}: expected the optimizer inside of `offload` as `tx`, got the "
            "`offload`; pass `tx` without it: a state in host memory, as "
            "`jax.vmap(optax_mp.offload(tx).init)(layers)` makes it, is copied by "
            "layers."
        )
    wanted = jax.eval_shape(jax.vmap(tx.init), layers)
    for kind, problem in _REFUSED.items():
        if find_states(wanted, kind):
            raise ValueError(f"{CALLER}: `tx` has {problem}; or take a separate step.")
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
                f"{CALLER}: `layers` is a single array, and `tx` does not work for "
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
            f"{CALLER}: expected one layer or more, got `layers` with "
            f"{'no arrays' if count is None else 'leading axes of 0'}; train a model "
            "without layers by a separate step."
        )
    for path, x in leaves:
        if not is_array(x) or x.shape[:1] != (count,):
            raise ValueError(
                f"{CALLER}: expected `layers` at {spell(path)} to be an array with a "
                f"leading axis of {count} layers, got {describe(x)}; stack the arrays "
                "of all layers, and pass all else in `rest`."
            )
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended) and bits(x.dtype) < 8:  # noqa: PLR2004
            raise ValueError(
                f"{CALLER}: expected `layers` at {spell(path)} in 8 bits or more, got "
                f"{describe(x)}; pass it beside the layers, `scan_layers(block, carry, "
                "(layers, x))`."
            )
        if x.dtype == np.float16:
            warn(
                f"{CALLER}: `layers` at {spell(path)} is {describe(x)}. In float16, "
                "gradients below 6e-8 become 0, and a release takes no loss scale; use "
                "bfloat16."
            )


def _check_state(wanted: Any, given: Any, name: str, remedy: str) -> None:
    """Raise unless a state has arrays of the wanted shapes and dtypes."""
    leaves, others = map(tree_leaves_with_path, (wanted, given))
    if len(leaves) != len(others):
        raise ValueError(
            f"{CALLER}: expected {name} to have {len(leaves)} arrays, got "
            f"{len(others)}; {remedy}."
        )
    for (path, want), (_, x) in zip(leaves, others, strict=True):
        if describe(x) != describe(want):
            raise ValueError(
                f"{CALLER}: expected {name} at {spell(path)} to be {describe(want)}, "
                f"got {describe(x)}; {remedy}."
            )


def _trace_update(tx: Any, opt_state: Any, layers: Any) -> tuple[Any, Any]:
    """Return the jaxpr of the update of one layer, and what it returns."""

    def update(opt_state: Any, layers: Any) -> Any:
        weights = layer_at(layers, 0)
        grads = jax.tree.map(lambda x: x if is_inexact(x) else None, weights)
        state = bring(layer_at(opt_state, 0))
        return tx.update(widen_gradients(grads), state, weights)

    try:
        return jax.make_jaxpr(update, return_shape=True)(opt_state, layers)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{CALLER}: expected an optimizer that needs nothing but gradients and "
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
                f"{CALLER}: expected `tx` to update each array by itself, because no "
                "layer's step waits for the gradients of the others, got an update of "
                f"several params, such as {first} and {second}, in {origin.joined_in}; "
                "clip each array by `optax.clip_by_block_rms` or "
                "`optax.adaptive_grad_clip`; or pass `by_layer=True`, to compute it "
                "over the arrays of each layer alone."
            )


def scanning_once(fun: Callable[..., Any]) -> Callable[..., Any]:
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
                    f"{CALLER}: expected a loss that passes the layers {spell(path)} "
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
