"""Gradients of a scaled loss for loops without an optimizer state, with retries."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._tree import all_finite, describe, is_array
from optax_mp.scaling._call import check_function
from optax_mp.scaling._gradients import differentiate


def dynamic_scale_value_and_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, redo_on_nan: int = 0
) -> Callable[..., Any]:
    """Return `f(*args, loss_scale) -> (new_loss_scale, (value, grads))`.

    For loops that hold a `DynamicLossScale` and no optimizer state. The gradients are
    those of the first argument, float32 and unscaled, and the loss scale is adjusted.
    If the loss or a gradient is not finite, the same batch is tried again with the
    lower scale, up to `redo_on_nan` times. If the last try fails as well, its gradients
    are returned, so check them with `all_finite`.

    Auxiliary outputs may be infinite or NaN; they cause no retry.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`.
        has_aux: whether `fun` returns auxiliary data, too.
        redo_on_nan: how often to try again.

    Returns:
        The function. Pass `loss_scale` by keyword; other keywords are passed to `fun`.
        With `has_aux` its value is (loss, aux).

    Raises:
        ValueError: if `redo_on_nan` is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> f = optax_mp.dynamic_scale_value_and_grad(
        ...     lambda x: (x * 3e4).sum(), redo_on_nan=9
        ... )
        >>> scale = optax_mp.DynamicLossScale(2.0**6)
        >>> scale, (loss, grads) = f(jnp.ones(1, jnp.float16), loss_scale=scale)
        >>> float(scale.loss_scale), grads.tolist()
        (2.0, [30000.0])
    """
    return _with_retries(fun, has_aux, redo_on_nan, "dynamic_scale_value_and_grad")


def dynamic_scale_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, redo_on_nan: int = 0
) -> Callable[..., Any]:
    """Return `f(*args, loss_scale) -> (new_loss_scale, grads)`.

    Like `dynamic_scale_value_and_grad` without the value. With `has_aux` the result is
    (new_loss_scale, (grads, aux)).

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`.
        has_aux: whether `fun` returns auxiliary data, too.
        redo_on_nan: how often to try the same batch again.

    Returns:
        The function.

    Raises:
        ValueError: if `redo_on_nan` is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> f = optax_mp.dynamic_scale_grad(lambda x: (x**2).sum())
        >>> scale, grads = f(jnp.ones(2), loss_scale=optax_mp.DynamicLossScale(8.0))
        >>> grads.tolist()
        [2.0, 2.0]
    """
    with_value = _with_retries(fun, has_aux, redo_on_nan, "dynamic_scale_grad")

    def evaluate(*args: Any, loss_scale: Any = None, **kwargs: Any) -> Any:
        scale, (value, grads) = with_value(*args, loss_scale=loss_scale, **kwargs)
        return scale, (grads, value[1]) if has_aux else grads

    return evaluate


def _with_retries(
    fun: Callable[..., Any], has_aux: bool, redo_on_nan: int, caller: str
) -> Callable[..., Any]:
    check_function(fun, 0, has_aux, caller)
    if not (isinstance(redo_on_nan, int) and redo_on_nan >= 0):
        raise ValueError(
            f"{caller}: `redo_on_nan` is {redo_on_nan!r}, expected how often to try "
            "again, 0 or more."
        )

    def attempt(scale: Any, args: Any, kwargs: Any) -> Any:
        factor = scale.loss_scale
        value, grads = differentiate(fun, 0, has_aux, factor, args, kwargs, caller)
        grads = scale.unscale(grads)
        finite = all_finite((value[0] if has_aux else value, grads))
        return finite, (scale.adjust(finite), (value, grads))

    def evaluate(*args: Any, loss_scale: Any = None, **kwargs: Any) -> Any:
        if not (hasattr(loss_scale, "adjust") and hasattr(loss_scale, "unscale")):
            raise TypeError(
                f"{caller}: `loss_scale` is {describe(loss_scale)}, expected a loss "
                "scale such as `optax_mp.DynamicLossScale(2.0**15)`; call as f(params, "
                "..., loss_scale=loss_scale)."
            )
        finite, first = attempt(loss_scale, args, kwargs)
        if not redo_on_nan:
            return first
        # A loop carries only arrays, and auxiliary output may be anything.
        leaves, treedef = jax.tree.flatten(first)
        arrays_at = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

        def fill(arrays: Sequence[Any]) -> Any:
            for i, array in zip(arrays_at, arrays, strict=True):
                leaves[i] = array
            return treedef.unflatten(leaves)

        def needs_retry(carry: Any) -> jax.Array:
            tries, finite, _ = carry
            return ~finite & (tries < redo_on_nan)

        def retry(carry: Any) -> Any:
            tries, _, arrays = carry
            finite, result = attempt(fill(arrays)[0], args, kwargs)
            new_leaves = jax.tree.leaves(result)
            return tries + 1, finite, [new_leaves[i] for i in arrays_at]

        start = jnp.int32(0), finite, [leaves[i] for i in arrays_at]
        return fill(lax.while_loop(needs_retry, retry, start)[2])

    return evaluate
