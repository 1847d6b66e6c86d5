"""convert_opt_state: a live run's state for another form of the same optimizer."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._inner_view import without_aliases
from optax_mp._jax._traced import Traced
from optax_mp._leaves import Leaves, is_absent
from optax_mp._tree import PyTree, cast_floating, describe, is_array, is_floating, place
from optax_mp.compact._blocks import Quantized, dequantized, quantized
from optax_mp.compact._low_bit import LowBitState
from optax_mp.compact._stochastic import StochasticRoundingState
from optax_mp.loss_scale._state import LossScaleState
from optax_mp.masters._access import (
    MixedPrecisionState,
    master_params,
    mixed_precision_states,
)
from optax_mp.masters.storage._contract import check_carrier, storage_of

_CALLER = "convert_opt_state"
_WRAPPERS = (MixedPrecisionState, LowBitState, StochasticRoundingState, LossScaleState)


def convert_opt_state(
    state: optax.OptState,
    from_tx: optax.GradientTransformation,
    to_tx: optax.GradientTransformation,
    params: optax.Params,
) -> optax.OptState:
    """Return a run's optimizer state in the form that another transformation keeps.

    Between plain optax in float32, `mixed_precision` with any storage, `low_bit_state`,
    `stochastic_rounding` and a loss scale around, whichever side has which: counts and
    moments go over, masters and moments are encoded anew. Both transformations must
    have the same optimizer inside. What only the new form has (a scale, say) starts as
    its `init` has it; what only the old one had is dropped.

    The params stay as they are, with two exceptions that are the caller's to make. From
    float32 params to 16-bit ones: convert first, with `param_dtype` in `to_tx` (so the
    masters keep every bit), then cast. To plain float32: go on with
    `master_params(state, params)` as params, or from `stochastic_rounding`, which has
    none, with the params cast.

    Args:
        state: of the run, made by `from_tx`.
        from_tx: the transformation that the run had until now.
        to_tx: the one that it is to go on with.
        params: the params that belong to `state`.

    Returns:
        A state of `to_tx`; it shares no buffer with `state` or `params`.

    Raises:
        ValueError: if `state` is not one of `from_tx`, or if the two transformations
            have not the same optimizer inside.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
        >>> adamw = optax.adamw(1e-3)
        >>> before = optax_mp.mixed_precision(adamw)
        >>> state = before.init(params)
        >>> after = optax_mp.mixed_precision(
        ...     optax_mp.low_bit_state(adamw), storage=optax_mp.Split(bits=8)
        ... )
        >>> state = optax_mp.convert_opt_state(state, before, after, params)
        >>> state.master_params["w"].dtype.name
        'int8'
    """
    _check_made_by(state, from_tx, params)
    has_masters = bool(mixed_precision_states(state))
    wrappers = _wrappers(state)
    truth = master_params(state, params) if has_masters else params
    if StochasticRoundingState in wrappers:
        truth = cast_floating(truth, jnp.float32)  # as its optimizer saw them
    template = to_tx.init(params)
    if not mixed_precision_states(template):
        # The moments of a bare optimizer have the dtype of its params.
        template = to_tx.init(truth)
    values = _matched(_bare(state), _bare(template))
    masters = (truth, params) if has_masters else None
    filled = _filled(template, iter(values), wrappers, masters)
    # What came from `state` or `params` as it was must not be donated twice.
    return without_aliases(filled, (state, params))


def _is_wrapped(node: Any) -> bool:
    return isinstance(node, _WRAPPERS) or isinstance(node, Quantized)


def _bare(state: optax.OptState) -> PyTree:
    """Return the state of the optimizer inside, without our wrappers and codes."""

    def unwrapped(node: Any) -> Any:
        if isinstance(node, Quantized):
            return dequantized(node)
        return _bare(node.inner_state) if isinstance(node, _WRAPPERS) else node

    return jax.tree.map(unwrapped, state, is_leaf=_is_wrapped)


def _wrappers(state: optax.OptState) -> dict[type, Any]:
    """Return the wrappers in a state, by their type."""
    found: dict[type, Any] = {}

    def collect(node: Any) -> None:
        if isinstance(node, _WRAPPERS):
            found.setdefault(type(node), node)
            jax.tree.map(collect, node.inner_state, is_leaf=_is_wrapped)

    jax.tree.map(collect, state, is_leaf=_is_wrapped)
    return found


def _filled(
    template: PyTree,
    values: Iterator[Any],
    wrappers: dict[type, Any],
    masters: tuple[PyTree, PyTree] | None,
) -> Any:
    """Return the template with `values` in the place of the bare optimizer's leaves."""

    def fill(node: Any) -> Any:
        if isinstance(node, Quantized):
            return quantized(next(values), node, None)
        if not isinstance(node, _WRAPPERS):
            value = next(values)
            return value.astype(node.dtype) if is_floating(value) else value
        own = node
        if isinstance(node, MixedPrecisionState):
            own = node._replace(master_params=_encoded(node.master_params, masters))
        elif type(node) in wrappers:
            own = wrappers[type(node)]
        inner_state = _filled(node.inner_state, values, wrappers, masters)
        return own._replace(inner_state=inner_state)

    return jax.tree.map(fill, template, is_leaf=_is_wrapped)


def _encoded(stored: PyTree, masters: tuple[PyTree, PyTree] | None) -> PyTree:
    """Return masters in the form of `stored`; without any, as `init` made them."""
    if masters is None:
        return stored
    kept = Leaves.of(
        stored, caller=_CALLER, name="the masters of `to_tx`", absent_too=True
    )
    truth, params = (kept.match(tree, "`params`") for tree in masters)
    encoded = list(kept.values)
    for i, (old, param) in enumerate(zip(kept.values, params, strict=True)):
        if is_absent(old):
            continue
        storage = storage_of(old)
        check_carrier(storage, param, f"{_CALLER}: param {place(kept.paths[i])}")
        encoded[i] = storage.encode(_as_master(truth[i], old), param, param.dtype)
    return kept.unflatten(encoded)


def _as_master(master: jax.Array, stored: jax.Array) -> jax.Array:
    return master.astype(stored.dtype if is_floating(stored) else jnp.float32)


def _check_made_by(state: Any, tx: optax.GradientTransformation, params: Any) -> None:
    traced = Traced.of(tx.init, params)
    expected = traced.treedef.unflatten(traced.outputs)
    # Not the dtype of floats, which some optimizers change at their first step.
    _matched(state, expected, "`state`", "a state of `from_tx`", kinds_too=True)


def _matched(
    state: PyTree,
    template: PyTree,
    name: str = "the optimizer's part of `state`",
    template_name: str = "that of `to_tx`",
    *,
    kinds_too: bool = False,
) -> list[Any]:
    """Return the leaves of `state`, once they are known to be like those of another."""
    expected = Leaves.of(template, caller=_CALLER, name=template_name)
    found = expected.match(state, name)
    for path, want, leaf in zip(expected.paths, expected.values, found, strict=True):
        if not is_array(want):
            continue
        same = is_array(leaf) and leaf.shape == want.shape
        if same and kinds_too and not (is_floating(leaf) and is_floating(want)):
            same = leaf.dtype == want.dtype
        if not same:
            raise ValueError(
                f"{_CALLER}: {name} is {describe(leaf)} at {place(path)}, expected "
                f"{describe(want)} as {template_name} has it; both transformations "
                "must have the same optimizer inside, and `from_tx` and `params` be "
                "those that `state` belongs to."
            )
    return found
