"""What `release_gradients` refuses: layers, states, optimizers and losses, by name."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import tree_leaves_with_path

from optax_mp.core._dtypes import bits, is_inexact
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._contact import varying_axes
from optax_mp.core.scaling._state import LossScaleState, loss_scale_state
from optax_mp.core.trees import _tree
from optax_mp.core.trees._boxes import plain
from optax_mp.core.trees._states import find_states
from optax_mp.core.wrappers._choose import no_link_before
from optax_mp.core.wrappers._mistakes import check_state_first
from optax_mp.jaxprs._dependence import Origin, origins
from optax_mp.release._layers import Stack, is_released
from optax_mp.release._scan import layer_at
from optax_mp.release._uses import derivative_calls

CALLER = "release_gradients"


def check_ranks() -> None:
    """Raise within ranks whose gradients JAX does not sum: no type says they differ.

    These are ranks with `check_vma=False` and of `jax.pmap`, where the gradient of a
    `pmean` is the rank's own. A separate step averages such gradients after the
    backward pass, but here the layers have taken their step by then.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = [name for name in mesh.manual_axes if mesh.shape[name] > 1]
    untold = [name for name in axes if not varying_axes(lax.axis_index(name))]
    if untold:
        raise ValueError(
            f"{CALLER}: expected gradients that JAX sums over ranks, got the axis "
            f"{' and '.join(map(repr, untold))} of `jax.shard_map(check_vma=False)` or "
            "`jax.pmap`; use `jax.shard_map(check_vma=True)`, and `jax.lax.pmean` the "
            "loss."
        )


def check_scans_have_gradients() -> None:
    """Raise under the switch of JAX 0.12 with which a scan has no gradient yet.

    The layers would not move, without an error.
    """
    if getattr(jax.config, "jax_scan3", False):
        raise ValueError(
            f"{CALLER}: expected JAX's switch `jax_scan3` to be off, got it on; turn "
            "it off, because scans have no gradients with it."
        )


def scale_of_step(rest_state: Any, rest: Any) -> jax.Array | None:
    """Return the loss scale in the state of `rest`; None without one."""
    if rest_state is None:
        return None
    state = loss_scale_state(plain(rest_state), f"{CALLER}: `rest_state`")
    if state is None:
        return None
    if not jax.tree.leaves(_tree.only_inexact(plain(rest))):
        raise ValueError(
            f"{CALLER}: expected weights in `rest`, by whose step the loss scale "
            f"moves, got {_tree.summarize(rest)}; pass a param in `rest`, or train "
            "without a loss scale."
        )
    return state.scale


def check_skips(skipping: list[bool]) -> bool:
    """Return whether optimizers skip steps that are not finite; raise if only some."""
    if any(skipping) and not all(skipping):
        raise ValueError(
            f"{CALLER}: expected all optimizers of `tx` to skip steps that are not "
            f"finite, or none, got {sum(skipping)} of {len(skipping)} that do; put "
            "`optax.apply_if_finite` around each."
        )
    return any(skipping)


def _check_layers(layers: Any, is_scaled: bool) -> int:
    """Return how many layers there are, or raise unless they are stacked arrays."""
    leaves = tree_leaves_with_path(layers)
    count = next((x.shape[0] for _, x in leaves if getattr(x, "ndim", 0)), None)
    if not count:
        raise ValueError(
            f"{CALLER}: expected one layer or more, got `layers` with "
            f"{'no arrays' if count is None else 'leading axes of 0'}; train without "
            "`release_gradients`."
        )
    _check_stacked(layers, "`layers`", count, "pass all else in `rest`")
    for path, x in leaves:
        where = f"`layers` at {_tree.spell(path)}"
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended) and bits(x.dtype) < 8:
            raise ValueError(
                f"{CALLER}: expected {where} in 8 bits or more, got "
                f"{_arrays.describe(x)}; pass it beside the layers, "
                "`scan_layers(block, carry, (layers, x))`."
            )
        if x.dtype == np.float16 and not is_scaled:
            warn(
                f"{CALLER}: {where} is {_arrays.describe(x)}, in which gradients below "
                "6e-8 become 0; put `optax_mp.dynamic_loss_scale` around the "
                "optimizer of `rest`, and pass `rest_state`."
            )
    return count


def check_stack(stack: Stack, *, is_scaled: bool, by_layer: bool) -> bool:
    """Raise unless an optimizer steps a layer by only this layer's gradient.

    Args:
        stack: the layers and their optimizer.
        is_scaled: whether the loss is scaled.
        by_layer: whether the optimizer may need all gradients of a layer.

    Returns:
        Whether it skips steps whose gradients are not finite.
    """
    tx, opt_state, layers, _ = stack
    count = _check_layers(layers, is_scaled)
    call = "release_gradients(loss, tx)(opt_state, layers, rest, ...)"
    check_state_first(opt_state, layers, CALLER, call)
    # With fewer parts than layers, several would share the last: indices are clamped.
    _check_stacked(opt_state, "`opt_state`", count, "pass `jax.vmap(tx.init)(layers)`")
    init, state = jax.make_jaxpr(jax.vmap(tx.init), return_shape=True)(layers)
    if any(map(_arrays.is_host_type, init.out_avals)):
        raise ValueError(
            f"{CALLER}: expected `tx` without `offload`, got one with it; pass `tx` "
            "itself, with a state of `jax.vmap(optax_mp.offload(tx).init)(layers)`."
        )
    if find_states(state, LossScaleState):
        raise ValueError(
            f"{CALLER}: expected `tx` without a loss scale, got one in `opt_state`; "
            "put `optax_mp.dynamic_loss_scale` around the optimizer of `rest` alone, "
            "and pass its state as `rest_state`."
        )
    if find_states(state, optax.MultiStepsState):
        raise ValueError(
            f"{CALLER}: expected `tx` to need the gradients of one layer at a time, "
            "got `optax.MultiSteps`; use a larger batch, with `jax.checkpoint` in the "
            "block."
        )
    update = _trace_update(stack)
    skips = _skips_steps(state)
    if not by_layer:
        # Whether gradients are finite is known of all layers before the first step.
        _check_leafwise(init, update, layers, {"is_finite"} if skips else ())
    return skips


def _check_stacked(tree: Any, name: str, count: int, remedy: str) -> None:
    """Raise unless each array of a tree has a part for each layer."""
    for path, x in tree_leaves_with_path(tree):
        if not _arrays.is_array(x) or x.shape[:1] != (count,):
            raise ValueError(
                f"{CALLER}: expected {name} at {_tree.spell(path)} to be the stacked "
                f"arrays of {count} layers, got {_arrays.describe(x)}; {remedy}."
            )


def _trace_update(stack: Stack) -> Any:
    """Return the jaxpr of the update of one layer, from state and layers, or raise."""
    leaves = tree_leaves_with_path(stack.layers)
    without_gradient = [(path, x) for path, x in leaves if not is_inexact(x)]

    def update_layer(opt_state: Any, layers: Any) -> Any:
        state, weights = layer_at((opt_state, layers), 0)
        grads = _tree.in_float32(_tree.only_inexact(weights))
        with no_link_before():
            updates, new = stack.tx.update(
                grads, _arrays.to_device_tree(state), weights
            )
        if without_gradient and jax.tree.structure(new) != jax.tree.structure(state):
            raise ValueError("the state after the step is another tree")
        return updates, new

    try:
        return jax.make_jaxpr(update_layer)(stack.opt_state, stack.layers)
    except (TypeError, ValueError) as error:
        expected = "needs only gradients and params of a layer"
        given, remedy = "", "take a separate step"
        for path, x in without_gradient[:1]:
            expected = "passes over params without a gradient"
            given = f", where {_tree.spell(path)} is {_arrays.describe(x)}"
            remedy = (
                "pass integers and booleans beside the layers, `scan_layers(block, "
                "carry, (layers, x))`, or put `mixed_precision` around `tx`"
            )
        raise ValueError(
            f"{CALLER}: expected a `tx` that {expected}, got one whose "
            f"`tx.update(grads, opt_state, params)` fails for one layer{given}; "
            f"{remedy}. It raised {type(error).__name__}: {error}"
        ) from error


def _skips_steps(state: Any) -> bool:
    """Return whether an optimizer with this state skips steps that are not finite."""
    groups = find_states(state, optax.MaskedState)
    if any(find_states(group, optax.ApplyIfFiniteState) for _, group in groups):
        raise ValueError(
            f"{CALLER}: expected `tx` to skip steps of all params or of none, got "
            "`optax.apply_if_finite` around some of them; put it around "
            "`optax.partition`."
        )
    return bool(find_states(state, optax.ApplyIfFiniteState))


def _check_leafwise(init: Any, update: Any, layers: Any, known: Any) -> None:
    """Raise if the update of an array depends on another array of the params.

    Args:
        init: the jaxpr from the layers to the state of their optimizer.
        update: the jaxpr of its update, from state and layers to updates and state.
        layers: the layers.
        known: names of primitives whose results are known before.
    """
    paths = [path for path, _ in tree_leaves_with_path(layers)]
    of_layers = [Origin(frozenset({i})) for i in range(len(paths))]
    of_state = origins(init, of_layers)
    count, found, before = len(update.out_avals) - len(of_state), [], None
    while of_state != before:
        found, before = origins(update, [*of_state, *of_layers], known), of_state
        # In the next step, the state is computed from what this one was given.
        of_state = list(map(lambda *x: Origin.join(x), before, found[count:]))
    for origin in found[:count]:
        if len(origin.groups) > 1:
            first, second, *_ = (_tree.spell(paths[i]) for i in sorted(origin.groups))
            raise ValueError(
                f"{CALLER}: expected `tx` to update each array by itself, got an "
                f"update of several params, such as {first} and {second}, in "
                f"{origin.joined_in}; clip with `max_norm`, or pass `by_layer=True`."
            )


def check_scans(jaxpr: Any, released: Any) -> None:
    """Raise unless a loss scans each stack of its layers once.

    Args:
        jaxpr: of the loss, whose first inputs are the arrays of the layers.
        released: the layers that the loss was given.
    """
    first = 0
    for path, x in tree_leaves_with_path(released, is_leaf=is_released):
        places = range(first, first := first + len(jax.tree.leaves(x)))
        if (calls := derivative_calls(jaxpr, *places)) != 1:
            times = "several" if math.isinf(calls) else f"{calls:g}"
            use = f"scans them {times} times"
            if math.isnan(calls):
                use = "reads or changes them outside of it"
            raise ValueError(
                f"{CALLER}: expected a loss that passes the layers {_tree.spell(path)} "
                f"unchanged to one `scan_layers`, got one that {use}; cast, regularize "
                "and reuse them in its block."
            )


def check_steps(released: Any) -> None:
    """Raise unless the backward pass has stepped each stack of layers."""
    for path, x in tree_leaves_with_path(released, is_leaf=is_released):
        if not x.stepper.is_used:
            raise ValueError(
                f"{CALLER}: expected a loss of what `scan_layers` returns, got one "
                f"that does not depend on the layers {_tree.spell(path)}; remove "
                "`jax.lax.stop_gradient`."
            )
