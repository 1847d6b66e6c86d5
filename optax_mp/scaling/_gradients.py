"""Gradients of a scaled loss, for loops with an optimizer state."""

import inspect
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._warnings import Event, count_event, event_counts, is_loss_scaled, warn
from optax_mp.scaling._state import loss_scale_state
from optax_mp.scaling._unscale import multiply
from optax_mp.trees._boxes import plain
from optax_mp.trees._tree import (
    as_array,
    in_float32,
    is_floating,
    only_inexact,
    summarize,
)
from optax_mp.wrappers._mistakes import check_state_first


def scale_loss(loss: jax.Array, opt_state: optax.OptState) -> jax.Array:
    """Return the loss times the loss scale in `opt_state`, in float32.

    For loops that call `jax.grad` themselves; `value_and_grad` does it for you.

    Args:
        loss: a floating scalar.
        opt_state: any optimizer state; without a loss scale in it the loss is returned
            unchanged.

    Returns:
        The scaled loss, float32 or wider.

    Raises:
        TypeError: if `opt_state` is no optimizer state.
        ValueError: if the loss is not a floating scalar; if the state holds several
            loss scales, or is of transforms in an order that does not work.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> state = optax_mp.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
        >>> float(optax_mp.scale_loss(jnp.float16(2.0), state))
        131072.0
    """
    _check_loss(loss, "scale_loss", "call `scale_loss(loss, opt_state)`")
    state = loss_scale_state(plain(opt_state), "scale_loss")
    if state is None:
        return loss
    count_event("scales its loss")
    return multiply(jnp.asarray(loss), state.scale)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return `f(opt_state, *args, **kwargs) -> (value, grads)` for a scaled loss.

    Like `jax.value_and_grad`, but the loss is multiplied by the loss scale in
    `opt_state` before it is differentiated. The value is the unscaled loss. The
    gradients are float32 and still scaled: pass them to `tx.update` as they are.

    Only floats in the differentiated arguments are differentiated: arrays, and Python
    numbers but in an Equinox module, where they are settings. Other leaves, such as
    counters or the functions in an Equinox module, get None as their gradient.

    Warns if params or `amp` are float16 and nothing scales the loss, if `fun` scales
    its loss as well, and if nothing in `opt_state` looks like the state of an
    optimizer.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`.
        argnums: which arguments to differentiate, counted without `opt_state`.
        has_aux: whether `fun` also returns auxiliary data.

    Returns:
        The function. With `has_aux` its value is (loss, aux).

    Raises:
        TypeError: when called, if `opt_state` is missing or in another place, or if
            there is nothing to differentiate.
        ValueError: when called, if the loss is not a floating scalar; if the state
            holds several loss scales, or is of transforms in an order that does not
            work, such as `optax.MultiSteps` around a loss scale.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> state = optax_mp.static_loss_scale(optax.sgd(0.1), 8.0).init(jnp.ones(2))
        >>> f = optax_mp.value_and_grad(lambda x: (x**2).sum())
        >>> loss, grads = f(state, jnp.array([1.0, 2.0], jnp.float16))
        >>> float(loss), grads.dtype.name, grads.tolist()
        (5.0, 'float32', [16.0, 32.0])
    """
    caller = "value_and_grad"
    differentiate = gradients_of(fun, argnums, has_aux, caller)
    known_events: set[Event] = set()

    def evaluate(opt_state: optax.OptState, *args: Any, **kwargs: Any) -> Any:
        opt_state = plain(opt_state)
        for other in (*args, *kwargs.values()):
            check_state_first(opt_state, other, caller, "f(opt_state, params, ...)")
        state = loss_scale_state(opt_state, caller)
        if state is not None:
            count_event("takes scaled gradients")
        before = event_counts()
        try:
            value, grads = differentiate(state and state.scale, args, kwargs)
        except TypeError as error:
            binds = [_binds(fun, x, kwargs) for x in (args, (opt_state, *args))]
            if binds != [False, True]:
                raise
            raise TypeError(
                f"{caller}: the first argument is {summarize(opt_state)}, and `fun` "
                f"lacks an argument without it; call `{caller}(fun)(opt_state, params, "
                "...)`, with what `tx.init(params)` returned as `opt_state`. Python "
                f"says: {error}"
            ) from error
        events = set(event_counts() - before)
        if state is None:
            _warn_if_unscaled(events, known_events)
        elif "scales its loss" in events:
            warn(
                f"{caller}: the function scales its loss, by `scale_loss` or by a "
                f"`DynamicLossScale`, and `{caller}` scales it once more; return the "
                "loss itself."
            )
        return value, in_float32(grads)

    return evaluate


def gradients_of(
    fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, caller: str
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]:
    """Return a function of a factor, and of the arguments of `fun` and its keywords.

    It returns the unscaled value of `fun`, and gradients times the factor. In 16 bits,
    small ones would be lost when they are unscaled or accumulated: callers bring them
    to float32.
    """
    check_function(fun, argnums, has_aux, caller)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def evaluate(factor: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        trees = _differentiated(chosen, args, caller)

        def scaled_loss(variables: Any) -> tuple[Any, Any]:
            new_args = list(args)
            filled = jax.tree.map(lambda x, v: x if v is None else v, trees, variables)
            for i, tree in zip(chosen, filled, strict=True):
                new_args[i] = tree
            value = loss = fun(*new_args, **kwargs)
            if has_aux:
                if not (isinstance(value, tuple) and len(value) == 2):
                    raise TypeError(
                        f"{caller}: expected the function to return a pair (loss, aux),"
                        f" as `has_aux` says, got {summarize(value)}."
                    )
                loss = value[0]
            _check_loss(loss, caller, "pass `has_aux=True` if it returns (loss, aux)")
            return loss if factor is None else multiply(loss, factor), value

        # Not `jax.value_and_grad`: its value would be the scaled loss.
        grads, value = jax.grad(scaled_loss, has_aux=True)(only_inexact(trees))
        if any(g.dtype == jnp.float16 for g in jax.tree.leaves(grads)):
            count_event("computes in float16")
        return value, grads[0] if isinstance(argnums, int) else tuple(grads)

    return evaluate


def _with_float_arrays(tree: Any) -> Any:
    """Return `tree` with arrays for Python floats, but in modules of Equinox.

    To Equinox these are settings, such as the rate of a dropout.
    """
    equinox = sys.modules.get("equinox")
    module = () if equinox is None else equinox.Module
    return jax.tree.map(as_array, tree, is_leaf=lambda x: isinstance(x, module))


def _check_loss(loss: Any, caller: str, remedy: str) -> None:
    is_scalar = is_floating(loss) and loss.shape == ()
    if not (is_scalar or isinstance(loss, float)):
        raise ValueError(
            f"{caller}: expected the loss to be a floating scalar, got "
            f"{summarize(loss)}; take its mean or sum, or {remedy}."
        )


def _differentiated(chosen: Any, args: Sequence[Any], caller: str) -> list[Any]:
    """Return the chosen arguments; raise unless they exist and hold a float."""
    takes_state = caller == "value_and_grad"
    call = "f(opt_state, params, ...)" if takes_state else "f(params, ...)"
    for i in chosen:
        if not -len(args) <= i < len(args):
            raise ValueError(
                f"{caller}: `argnums` has {i}, but {len(args)} positional arguments "
                f"of the function were given; call as {call}."
            )
    trees = [_with_float_arrays(args[i]) for i in chosen]
    if jax.tree.leaves(trees) and not jax.tree.leaves(only_inexact(trees)):
        shown = " and ".join(summarize(args[i]) for i in chosen)
        raise TypeError(
            f"{caller}: expected floating arrays in the argument to differentiate, got "
            f"{shown}; call as {call}, or choose another argument by `argnums`."
        )
    return trees


def check_function(fun: Any, argnums: Any, has_aux: Any, caller: str) -> None:
    """Raise unless `fun` can be called, and the others are settings."""
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    are_integers = all(isinstance(i, Integral) for i in numbers)
    if not (callable(fun) and are_integers and isinstance(has_aux, bool)):
        raise TypeError(
            f"{caller}: expected `fun` to be a function, `argnums` integers and "
            f"`has_aux` a bool, got {summarize(fun)}, {summarize(argnums)} and "
            f"{summarize(has_aux)}; pass the arguments of `fun` to what `{caller}` "
            "returns."
        )


def _warn_if_unscaled(events: set[Event], known_events: set[Event]) -> None:
    """Warn once if a function computes in float16, and nothing scales its loss.

    Args:
        events: the events of this call of the function.
        known_events: the events of earlier calls, because jitted functions report only
            when they are traced; the events of this call are added.
    """
    is_new = "computes in float16" in events - known_events
    known_events |= events
    if is_new and not is_loss_scaled(known_events):
        warn(
            "value_and_grad: gradients are computed in float16, and `opt_state` holds "
            "no loss scale, so values below 6e-8 become 0; use bfloat16, or put "
            "`optax_mp.dynamic_loss_scale` around the optimizer. Ignore this "
            "MixedPrecisionWarning if the loss is scaled in another way."
        )


def _binds(fun: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function takes these arguments."""
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True
