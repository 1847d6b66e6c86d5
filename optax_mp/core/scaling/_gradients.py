"""Gradients of a scaled loss, for loops with an optimizer state."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp.core import _dtypes, _warnings
from optax_mp.core.scaling._state import loss_scale_state
from optax_mp.core.scaling._unscale import multiply
from optax_mp.core.trees import _tree
from optax_mp.core.trees._boxes import plain
from optax_mp.core.wrappers._mistakes import check_state_first


def scale_loss(loss: jax.Array, opt_state: optax.OptState) -> jax.Array:
    """Return the loss times the loss scale in `opt_state`, in float32.

    It is for loops that call `jax.grad` themselves. `value_and_grad` does it for you.

    Args:
        loss: floating `[]`.
        opt_state: any optimizer state; without a loss scale in it the loss is returned
            unchanged.

    Returns:
        The scaled loss, `[]`, float32 or wider.

    Raises:
        TypeError: if `opt_state` is not an optimizer state.
        ValueError: if the loss is not a floating scalar; if the state holds several
            loss scales, or transforms in an order that does not work.

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
    _warnings.record_event("scales its loss")
    return multiply(jnp.asarray(loss), state.scale)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return `f(opt_state, *args, **kwargs) -> (value, grads)` for a scaled loss.

    Like `jax.value_and_grad`, but the loss is multiplied by the loss scale in
    `opt_state` before it is differentiated. The value is the unscaled loss. The
    gradients are float32 and still scaled: pass them to `tx.update` unchanged.

    Floating and complex arrays in the chosen arguments are differentiated. So are
    Python floats, except in an Equinox module, where they are settings. Other leaves,
    such as counters or the functions in an Equinox module, get None as their gradient.

    Warns if params or `amp` are float16 and nothing scales the loss, if `fun` scales
    its loss as well, and if nothing in `opt_state` looks like the state of an
    optimizer.

    Args:
        fun: a function that returns a loss, floating `[]`, or (loss, aux) with
            `has_aux`.
        argnums: which arguments to differentiate, counted without `opt_state`.
        has_aux: whether `fun` also returns auxiliary data.

    Returns:
        The function. With `has_aux` its value is (loss, aux). Each gradient is float32
        or wider, `[...]`.

    Raises:
        TypeError: when called, if `opt_state` is missing or in another place, or if
            there is nothing to differentiate.
        ValueError: when called, if the loss is not a floating scalar; if the state
            holds several loss scales, or transforms in an order that does not work,
            such as `optax.MultiSteps` around a loss scale.

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
    # Of any call, because a loss that is jitted runs only when it is traced.
    has_scaled_itself = False

    def evaluate(opt_state: optax.OptState, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_scaled_itself
        events: set[_warnings.Event] = set()
        opt_state = plain(opt_state)
        for other in (*args, *kwargs.values()):
            check_state_first(opt_state, other, caller, "f(opt_state, params, ...)")
        state = loss_scale_state(opt_state, caller)
        with _warnings.recorded_in(events):
            value, grads = differentiate(state and state.scale, args, kwargs)
        if any(g.dtype == jnp.float16 for g in jax.tree.leaves(grads)):
            events.add("computes in float16")
        has_scaled_itself |= "scales its loss" in events
        is_unscaled = state is None and not has_scaled_itself
        if is_unscaled and "computes in float16" in events:
            _warnings.warn(
                f"{caller}: gradients are computed in float16, and `opt_state` holds "
                "no loss scale; put `optax_mp.dynamic_loss_scale` around the "
                "optimizer, or use bfloat16."
            )
        if state is not None and "scales its loss" in events:
            _warnings.warn(
                f"{caller}: the function scales its loss, and `{caller}` scales it "
                "once more; return the loss itself."
            )
        return value, _tree.in_float32(grads)

    return evaluate


def gradients_of(
    fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, caller: str
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]:
    """Return `f(factor, args, kwargs) -> (value, grads)` for a scaled loss.

    The factor is float32 `[]`, or None for 1. The value of `fun` is unscaled, and the
    gradients are multiplied by the factor, each `[...]` in the dtype of its param. In
    16 bits, small ones would be lost when they are unscaled or accumulated, so callers
    cast them to float32.
    """
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
                        f" as `has_aux` says, got {_tree.summarize(value)}."
                    )
                loss = value[0]
            _check_loss(loss, caller, "pass `has_aux=True` if it returns (loss, aux)")
            return loss if factor is None else multiply(loss, factor), value

        # Not `jax.value_and_grad`: its value would be the scaled loss.
        grads, value = jax.grad(scaled_loss, has_aux=True)(_tree.only_inexact(trees))
        return value, grads[0] if isinstance(argnums, int) else tuple(grads)

    return evaluate


def _with_float_arrays(tree: Any) -> Any:
    """Return `tree` with arrays for Python floats, except in modules of Equinox.

    There they are settings, such as the rate of a dropout.
    """
    equinox = sys.modules.get("equinox")
    module = () if equinox is None else equinox.Module
    return jax.tree.map(_dtypes.as_array, tree, is_leaf=lambda x: isinstance(x, module))


def _check_loss(loss: Any, caller: str, remedy: str) -> None:
    is_scalar = _dtypes.is_floating(loss) and loss.shape == ()
    if not (is_scalar or isinstance(loss, float)):
        raise ValueError(
            f"{caller}: expected the loss to be a floating scalar, got "
            f"{_tree.summarize(loss)}; take its mean or sum, or {remedy}."
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
    if jax.tree.leaves(trees) and not jax.tree.leaves(_tree.only_inexact(trees)):
        shown = " and ".join(_tree.summarize(args[i]) for i in chosen)
        raise TypeError(
            f"{caller}: expected floating arrays in the argument to differentiate, got "
            f"{shown}; call as {call}, or choose another by `argnums`."
        )
    return trees
