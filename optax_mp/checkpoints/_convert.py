"""convert_opt_state: a live run's state for another form of the same optimizer."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._inner import as_transformation, without_aliases
from optax_mp._jax._traced import Traced
from optax_mp._leaves import Leaves, is_absent
from optax_mp._states import find_states, map_states
from optax_mp._tree import PyTree, cast_floating, describe, is_array, is_floating, place
from optax_mp.compact._blocks import Quantized, dequantize, quantize
from optax_mp.compact._low_bit import LowBitState
from optax_mp.compact._stochastic import StochasticRoundingState
from optax_mp.loss_scale import LossScaleState
from optax_mp.masters._access import (
    check_param_is_trained,
    master_params,
    match_stored,
    replace_stored,
)
from optax_mp.masters._state import MixedPrecisionState, check_storage_known

_CALLER = "convert_opt_state"
_WRAPPERS = (MixedPrecisionState, LowBitState, StochasticRoundingState, LossScaleState)


def convert_opt_state(
    opt_state: optax.OptState,
    params: optax.Params,
    from_tx: optax.GradientTransformation,
    to_tx: optax.GradientTransformation,
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
        opt_state: the state of the run, made by `from_tx`.
        params: the params that belong to `opt_state`.
        from_tx: the transformation that the run has used so far.
        to_tx: the transformation to continue with.

    Returns:
        A state of `to_tx`. It shares no buffer with `opt_state` or `params`.

    Raises:
        TypeError: if `params` or a transformation is of another kind.
        ValueError: if `opt_state` is not a state of `from_tx`, or if the two
            transformations have different optimizers inside.

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
        >>> state = optax_mp.convert_opt_state(state, params, before, after)
        >>> state.master_params["w"].dtype.name
        'int8'
    """
    if isinstance(params, optax.GradientTransformation):
        raise TypeError(
            f"{_CALLER}: `params` is a {type(params).__name__}, expected the params; "
            "`convert_opt_state(state, from_tx, to_tx, params)` is now "
            "`convert_opt_state(opt_state, params, from_tx, to_tx)`."
        )
    from_tx = as_transformation(from_tx, _CALLER, "from_tx")
    to_tx = as_transformation(to_tx, _CALLER, "to_tx")
    _check_made_by(opt_state, from_tx, params)
    wrappers = {kind: find_states(opt_state, kind) for kind in _WRAPPERS}
    has_masters = bool(wrappers[MixedPrecisionState])
    truth = master_params(opt_state, params) if has_masters else params
    if wrappers[StochasticRoundingState]:
        truth = cast_floating(truth, jnp.float32)  # as its optimizer saw them
    template = to_tx.init(params)
    if not find_states(template, MixedPrecisionState):
        # The moments of a bare optimizer have the dtype of its params.
        template = to_tx.init(truth)
    values = _matched(_unwrap(opt_state), _unwrap(template))
    own = {kind: found[0][1] for kind, found in wrappers.items() if found}
    masters = (truth, params) if has_masters else None
    filled = _filled(template, iter(values), own, masters)
    # What came from `opt_state` or `params` as it was must not be donated twice.
    return without_aliases(filled, (opt_state, params))


def _unwrap(state: optax.OptState) -> PyTree:
    """Return the state of the optimizer inside, without our wrappers and codes."""

    def unwrap(node: Any) -> Any:
        if isinstance(node, Quantized):
            return dequantize(node)
        return node.inner_state

    return map_states(unwrap, state, (*_WRAPPERS, Quantized))


def _filled(
    template: PyTree,
    values: Iterator[Any],
    wrappers: dict[type, Any],
    masters: tuple[PyTree, PyTree] | None,
) -> Any:
    """Return the template with `values` in the place of the bare optimizer's leaves."""

    def fill(node: Any) -> Any:
        if isinstance(node, Quantized):
            return quantize(next(values), node, None)
        if not isinstance(node, _WRAPPERS):
            value = next(values)
            return value.astype(node.dtype) if is_floating(value) else value
        own = node
        if isinstance(node, MixedPrecisionState):
            own = _encode_masters(node, masters)
        elif type(node) in wrappers:
            own = wrappers[type(node)]
        inner_state = _filled(node.inner_state, values, wrappers, masters)
        return own._replace(inner_state=inner_state)

    kinds = (*_WRAPPERS, Quantized)
    return jax.tree.map(fill, template, is_leaf=lambda node: isinstance(node, kinds))


def _encode_masters(
    template: MixedPrecisionState, masters: tuple[PyTree, PyTree] | None
) -> MixedPrecisionState:
    """Return the masters as the storage of `template` keeps them.

    Without any they stay as `init` made them, from the params.
    """
    if masters is None:
        return template
    truth, params = masters
    storage = check_storage_known(template, _CALLER)
    leaves = Leaves.of(params, caller=_CALLER, name="`params`")
    values = leaves.match(truth, "the masters")
    encoded = match_stored(leaves, template)
    for i, stored in enumerate(encoded):
        if is_absent(stored):
            continue
        param = leaves.values[i]
        if storage.param_is_part:
            where = f"{_CALLER}: param {place(leaves.paths[i])}"
            check_param_is_trained(storage, param, where)
        dtype = jax.eval_shape(storage.decode, stored, param).dtype
        encoded[i] = storage.encode(values[i].astype(dtype), param)
    return replace_stored(leaves, template, encoded)


def _check_made_by(state: Any, tx: optax.GradientTransformation, params: Any) -> None:
    traced = Traced.of(tx.init, params)
    expected = traced.treedef.unflatten(traced.outputs)
    # Not the dtype of floats, which some optimizers change at their first step.
    _matched(state, expected, "`opt_state`", "a state of `from_tx`", kinds_too=True)


def _matched(
    state: PyTree,
    template: PyTree,
    name: str = "the optimizer's part of `opt_state`",
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
                "must have the same optimizer inside, and `opt_state` must belong "
                "to `from_tx` and `params`."
            )
    return found
