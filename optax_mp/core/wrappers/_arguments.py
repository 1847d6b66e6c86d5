"""The arguments of an update: params, the gradient of each, and the state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp.core import _dtypes
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api._arrays import describe
from optax_mp.core.trees import _tree
from optax_mp.core.trees._leaves import ABSENT, Leaves
from optax_mp.core.wrappers._protocol import update_inner
from optax_mp.core.wrappers._updates import or_no_change

_UPDATE = "`tx.update(grads, state, params)`"


def check_own_state(state: Any, kind: type, caller: str, **settings: Any) -> None:
    """Raise unless the `state` given to `update` is of the kind that `init` makes.

    Raise also unless the state was made with the same settings, which its type carries.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"{caller}: expected `state` to be the {kind.__name__} that `init` "
            f"returns, got {_tree.summarize(state)}; call {_UPDATE}, and convert "
            "another state with `optax_mp.convert_opt_state`."
        )
    for name, wanted in settings.items():
        if (own := getattr(state, name)) != wanted:
            raise ValueError(
                f"{caller}: expected a state made with {wanted}, got one made with "
                f"{own}; call `init` again, or convert it with "
                "`optax_mp.convert_opt_state`."
            )


def require_params(params: Any, caller: str) -> Any:
    """Return the params that `update` was called with, or raise."""
    if params is None:
        raise ValueError(f"{caller}: expected `params`, got None; call {_UPDATE}.")
    return params


def as_inner_param(param: Any) -> Any:
    """Return a param for `inner` to train, or `MaskedNode()` if it is not inexact."""
    if not _dtypes.is_inexact(param):
        return optax.MaskedNode()
    # Moments made from a weakly typed param would change type at the first update.
    if isinstance(param, jax.Array) and not param.weak_type:
        return param
    # NumPy's float64 is float32 to JAX.
    return jnp.asarray(param, jnp.result_type(param))


@dataclass(frozen=True)
class MatchedArguments:
    """The arguments of an `update`, matched leaf by leaf and checked.

    Attributes:
        params: the params, each `[...]`.
        grads: the gradient of each param, `[...]`, `[B, ...]` per example, or None or
            `MaskedNode()`.
        is_lookahead: whether there are two copies of the params, and gradients of one.
    """

    params: Leaves
    grads: list[Any]
    is_lookahead: bool

    @classmethod
    def match(cls, grads: Any, params: Any, leaves: Leaves) -> "MatchedArguments":
        """Return the arguments of an `update`, or raise; `leaves` are of `params`."""
        # `optax.lookahead` passes a fast and a slow copy of the params, and gradients
        # of the fast one. Here both get them, so that every param has a gradient.
        has_copies = [isinstance(x, optax.LookaheadParams) for x in (params, grads)]
        is_lookahead = has_copies == [True, False]
        if is_lookahead:
            grads = optax.LookaheadParams(fast=grads, slow=grads)
        matched = match_gradients(leaves, grads)
        warn_of_gradients(leaves, matched)
        return cls(leaves, matched, is_lookahead)

    def run(
        self,
        inner: optax.GradientTransformationExtraArgs,
        inner_params: Sequence[Any],
        inner_state: Any,
        extra_args: dict[str, Any],
        advance: Callable[[int, Any], Any],
    ) -> tuple[list[Any], Any]:
        """Return (updates, new inner state).

        Args:
            inner: the optimizer.
            inner_params: what it sees of each param; `MaskedNode()` hides one.
            inner_state: its state.
            extra_args: extra arguments for it. Gradients, also in the extra argument
                `grad`, are cast to the dtypes of what it sees.
            advance: from the index of a param and its update by `inner`, `[...]`, to
                the update for the user, `[...]`.
        """
        params = self.params

        def cast(grads: Sequence[Any]) -> Any:
            return params.unflatten(map(_cast_gradient, inner_params, grads))

        if extra_args.get("grad") is not None:
            grad = params.match(extra_args["grad"], "the extra argument `grad`")
            extra_args = {**extra_args, "grad": cast(grad)}
        grads, seen = cast(self.grads), params.unflatten(inner_params)
        grads = grads.fast if self.is_lookahead else grads
        changes, inner_state = update_inner(
            inner, params.caller, grads, inner_state, seen, **extra_args
        )
        updates = params.match(changes, "the updates of `inner`")
        for i, change in enumerate(updates):
            if isinstance(inner_params[i], ABSENT):
                # The update of a leaf that is hidden from `inner` is its gradient.
                change = self.grads[i]
            elif not isinstance(change, ABSENT):
                change = advance(i, change)
            updates[i] = or_no_change(change, params.values[i])
        return updates, inner_state


def _cast_gradient(inner_param: Any, grad: Any) -> Any:
    """Return the gradient for `inner`, in the dtype of the param that `inner` sees."""
    if isinstance(inner_param, ABSENT):
        return inner_param
    if _dtypes.is_floating(grad) and _dtypes.is_floating(inner_param):
        # Not `astype`, which takes several times as long to trace.
        return lax.convert_element_type(grad, inner_param.dtype)
    return grad


def check_gradients(params: _tree.PyTree, grads: _tree.PyTree, caller: str) -> None:
    """Raise unless the gradient of each param fits it.

    Skipped without params, and if `optax.lookahead` passes two copies of them.
    """
    if params is None or isinstance(params, optax.LookaheadParams):
        return
    match_gradients(Leaves.of(params, caller=caller), grads)


def match_gradients(params: Leaves, grads: _tree.PyTree) -> list[Any]:
    """Return the gradient of each param; raise unless it fits the param."""
    matched = params.match(grads, "the gradients")
    for path, param, grad in zip(params.paths, params.values, matched, strict=True):
        is_trained, is_float = map(_dtypes.is_inexact, (param, grad))
        # What is not trained has no gradient, or one that is not floating, as float0.
        if isinstance(grad, ABSENT) or not (is_trained or is_float):
            continue
        is_complex = jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param)
        is_of_kind = is_trained and is_float and not is_complex
        # Only the last axes: `inner` reduces the leading ones of per-example gradients.
        shape = jnp.shape(grad)[jnp.ndim(grad) - jnp.ndim(param) :]
        if is_of_kind and shape == jnp.shape(param):
            continue
        where = f"{params.caller}: expected the gradient of {_tree.spell(path)}"
        got = f"got {describe(grad)} for the param {describe(param)}"
        if not is_of_kind:
            raise TypeError(
                f"{where} to be {'floating' if is_trained else 'None'}, {got}; leave "
                "out what is not trained, by `optax.masked` or a gradient of None."
            )
        raise ValueError(
            f"{where} to be of the same shape, {got}; pass params and gradients of the "
            "same model."
        )
    return matched


def warn_of_gradients(params: Leaves, grads: Sequence[Any]) -> None:
    """Warn if a floating param has None as its gradient, or a gradient is float16.

    Some rules skip a param without a gradient, and `equinox.apply_updates` takes
    None as its update. Others, and `optax.apply_updates`, fail. A float16 gradient was
    not unscaled in float32 by a loss scale.
    """
    leaves = list(zip(params.paths, params.values, grads, strict=True))
    for path, param, grad in leaves:
        if grad is None and _dtypes.is_inexact(param):
            warn(
                f"{params.caller}: expected a gradient of {_tree.spell(path)}, got "
                f"None for the param {describe(param)}; if it is not trained, wrap the "
                "optimizer in `optax.masked`, or pass zeros."
            )
            break
    for path, _, grad in leaves:
        if getattr(grad, "dtype", None) == jnp.float16:
            warn(
                f"{params.caller}: the gradient of {_tree.spell(path)} is "
                f"{describe(grad)}, in which values below 6e-8 become 0; put "
                "`dynamic_loss_scale` around the optimizer, or unscale gradients "
                "yourself, in float32."
            )
            return
