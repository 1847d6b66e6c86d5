"""The wrapped optimizer, `inner`: one update of it, its arguments, and its errors."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import tree_leaves_with_path

from optax_mp._jax._arrays import describe, is_array, is_on_host
from optax_mp._jax._jaxpr import TracedCall
from optax_mp._warnings import warn
from optax_mp.trees._leaves import ABSENT, Leaves
from optax_mp.trees._tree import PyTree, is_floating, is_inexact, spell, summarize
from optax_mp.wrappers._choose import choose_if_on_host
from optax_mp.wrappers._context import Transformation, context_of, without_context

_UPDATE = "`tx.update(grads, state, params)`"


def as_transformation(
    inner: Any, caller: str, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` as a transformation that takes extra arguments, or raise.

    Args:
        inner: the user's argument, which should be an optax transformation.
        caller: the public function that the user called, for error messages.
        name: the name of its argument, for error messages.
    """
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` would drop the extra arguments.
        update: Any = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{caller}: expected `{name}` to be an optax gradient transformation, such "
            f"as `optax.adamw(1e-3)`, got a {type(inner).__name__}; call its factory."
        )
    return optax.with_extra_args_support(inner)


def check_own_state(state: Any, kind: type, caller: str, **settings: Any) -> None:
    """Raise unless the `state` given to `update` is of the kind that `init` makes.

    With the same settings, which its type has; equal ones make states of one type.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"{caller}: expected `state` to be the {kind.__name__} that `init` of this "
            f"transform returns, got {summarize(state)}; call {_UPDATE}, and convert "
            "a state without this transform with `optax_mp.convert_opt_state`."
        )
    for name, wanted in settings.items():
        if (own := getattr(state, name)) != wanted:
            is_redefined = repr(own) == repr(wanted)
            why = " of a class that was redefined since then" * is_redefined
            raise ValueError(
                f"{caller}: expected a state made with {wanted}, as this transform has "
                f"it, got one made with {own}{why}; call `init` again, or convert it "
                "with `optax_mp.convert_opt_state`."
            )


def require_params(params: Any, caller: str) -> Any:
    """Return the params that `update` was called with, or raise."""
    if params is None:
        raise ValueError(f"{caller}: expected `params`, got None; call {_UPDATE}.")
    return params


def as_inner_param(param: Any) -> Any:
    """Return a param for `inner` to train, or `MaskedNode()` if it is not inexact."""
    if not is_inexact(param):
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
        params: the params.
        grads: the gradient of each param, or None or `MaskedNode()`.
        is_lookahead: whether there are two copies of the params for one of gradients.
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
            advance: from the index of a param and its update by `inner` to the update
                for the user.
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
    if is_floating(grad) and is_floating(inner_param):
        # Not `astype`, which takes several times as long to trace.
        return lax.convert_element_type(grad, inner_param.dtype)
    return grad


def check_gradients(params: PyTree, grads: PyTree, caller: str) -> None:
    """Raise unless each param has a gradient that can be its own.

    Nothing is known without params, and `optax.lookahead` passes two copies of them.
    """
    if params is None or isinstance(params, optax.LookaheadParams):
        return
    match_gradients(Leaves.of(params, caller=caller), grads)


def match_gradients(params: Leaves, grads: PyTree) -> list[Any]:
    """Return the gradient of each param; raise unless it can be its own."""
    matched = params.match(grads, "the gradients")
    for path, param, grad in zip(params.paths, params.values, matched, strict=True):
        if is_floating(grad) and is_floating(param) and grad.shape == param.shape:
            continue
        if isinstance(grad, ABSENT) or not (is_inexact(grad) or is_inexact(param)):
            continue
        error: type[Exception] = TypeError
        if not is_inexact(param):
            expected = "None or the float0 that `jax.grad(..., allow_int=True)` gives"
            remedy = "to train it, make it a floating array"
        elif not is_inexact(grad):
            expected = "a floating array"
            remedy = "if it is not trained, wrap the optimizer in `optax.masked`"
        elif jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            expected, remedy = "real", "take its real part"
        # Only the last axes: `inner` reduces the leading ones of per-example gradients.
        elif jnp.shape(grad)[jnp.ndim(grad) - jnp.ndim(param) :] != jnp.shape(param):
            error, expected = ValueError, "of the same shape"
            remedy = "pass params and gradients of the same model"
        else:
            continue
        raise error(
            f"{params.caller}: expected the gradient of {spell(path)} to be {expected},"
            f" got {describe(grad)} for the param {describe(param)}; {remedy}."
        )
    return matched


def warn_of_gradients(params: Leaves, grads: Sequence[Any]) -> None:
    """Warn if a floating param has None as its gradient, or a gradient is float16.

    Some rules skip a param without a gradient, and `equinox.apply_updates` takes
    None as its update. Others, and `optax.apply_updates`, fail. A float16 gradient was
    not unscaled in float32 by a loss scale.
    """
    if problem := _find_none(params, grads):
        warn(problem)
    for path, grad in zip(params.paths, grads, strict=True):
        if getattr(grad, "dtype", None) == jnp.float16:
            warn(
                f"{params.caller}: the gradient of {spell(path)} is {describe(grad)}. "
                "In float16, values below 6e-8 become 0: put `dynamic_loss_scale` "
                "around the optimizer, and take gradients with `value_and_grad`. If "
                "you scale the loss yourself, cast them to float32 and unscale them."
            )
            return


def _find_none(params: Leaves, grads: Sequence[Any]) -> str | None:
    """Return what is wrong if a floating param has None as its gradient."""
    for path, param, grad in zip(params.paths, params.values, grads, strict=True):
        if grad is None and is_inexact(param):
            return (
                f"{params.caller}: expected a gradient of {spell(path)}, got None for "
                f"the param {describe(param)}; if this param is not trained, wrap the "
                "optimizer in `optax.masked`, or let its gradient be zero."
            )
    return None


def or_no_change(update: Any, param: Any) -> Any:
    """Return an update; zeros for None or float0, which cannot be added to an array.

    Then params that are not differentiated, or are frozen by a gradient of None, pass
    through `optax.apply_updates`.
    """
    if update is not None and getattr(update, "dtype", None) != jax.dtypes.float0:
        return update
    kinds = jnp.number, jnp.bool_
    if not (is_array(param) and any(jnp.issubdtype(param.dtype, x) for x in kinds)):
        return update
    # Negative, because 0.0 would change a param of -0.0. Integers have one zero only.
    return jnp.full(param.shape, -0.0 if is_inexact(param) else 0, param.dtype)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Return what `optax.apply_updates` does; a param whose update is None stays."""

    def apply(param: Any, update: Any) -> Any:
        update = or_no_change(update, param)
        if isinstance(update, ABSENT):
            return param
        return optax.apply_updates(param, update)

    # It adds float32 updates to 16-bit params, and casts back.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(apply, params, updates, is_leaf=lambda x: x is None)


def update_inner(
    inner: Any, caller: str, grads: Any, state: Any, params: Any, /, **extra_args: Any
) -> tuple[Any, Any]:
    """Return (updates, new state) of `inner`.

    If its update fails, say whether its arguments are to blame. A gradient may be None,
    or the state may belong to another optimizer. The state is looked at only after a
    failure, because `init` must be traced for that.
    """
    try:
        if isinstance(inner, Transformation):
            return inner.update(grads, state, params, **extra_args)
        proceed = context_of(extra_args).proceed
        updates, new = inner.update(grads, state, params, **without_context(extra_args))
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        *_, module = (x.f_globals.get("__name__", "") for x, _ in frames)
        # An error of this package says what is wrong already.
        if params is None or module.startswith("optax_mp."):
            raise
        # `optax.lookahead` has two copies of the params, and gradients of one.
        trained = params.fast if isinstance(params, optax.LookaheadParams) else params
        leaves = Leaves.of(trained, caller=caller)
        problem = _find_none(leaves, leaves.match(grads, "the gradients"))
        problem = problem or _difference_to_own(inner, state, params, caller)
        if problem is None:
            raise
        raise ValueError(problem) from error
    _check_shapes(caller, "the update", updates, params)
    _check_shapes(caller, "the state", new, state)
    if proceed is not True and any(map(is_on_host, jax.tree.leaves(state))):
        # An `offload` inside of it was not told that the step may be skipped.
        new = jax.tree.map(partial(choose_if_on_host, proceed), new, state)
    return updates, new


def _check_shapes(caller: str, what: str, made: PyTree, given: PyTree) -> None:
    """Raise unless what `inner` made has the shapes of what it was given.

    Nothing is known if one of them has more leaves, as the state of `optax.monitor` has
    after its first step.
    """
    new, old = jax.tree.leaves(made), tree_leaves_with_path(given)
    if len(new) != len(old):
        return
    for x, (path, y) in zip(new, old, strict=True):
        if getattr(x, "shape", ()) != getattr(y, "shape", ()):
            raise ValueError(
                f"{caller}: expected {what} made by `inner` at {spell(path)} to have "
                f"the shape of {describe(y)}, got {describe(x)}; the gradient or the "
                "state is of other params (call `init` again), or `inner` changes it."
            )


def _difference_to_own(
    inner: optax.GradientTransformation, state: PyTree, params: PyTree, caller: str
) -> str | None:
    """Return how a state differs from what `inner` makes; None if it does not."""
    name = "what `inner.init(params)` makes"
    try:
        expected = TracedCall.of(inner.init, params).unflatten_outputs()
        own = Leaves.of(expected, caller=caller, name=name)
    except Exception:
        return None  # `init` also fails: nothing is known about the state
    try:
        own.match_arrays(state, "the inner state")
    except ValueError as error:
        return (
            f"{error}\n  The state is that of another optimizer, or of other params. "
            "Call `init` again, or convert it with `optax_mp.convert_opt_state`."
        )
    return None
