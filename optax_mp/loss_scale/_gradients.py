"""Gradients of a scaled loss, for optax states and for loss scales as values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import keystr

from optax_mp._dtypes import at_least_float32
from optax_mp._states import find_states
from optax_mp._tree import (
    all_finite,
    describe,
    is_array,
    is_floating,
    is_inexact,
)
from optax_mp.loss_scale._rule import LossScale, multiplied
from optax_mp.loss_scale._transform import LossScaleState


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """Return the loss scale in an optimizer state, at any depth of wrappers.

    Args:
        opt_state: any optimizer state.

    Returns:
        A float32 scalar; 1 if the state holds no loss scale.

    Raises:
        ValueError: if the state holds several loss scales.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax.chain(optax_mp.dynamic_loss_scale(), optax.sgd(0.1))
        >>> float(optax_mp.loss_scale(tx.init(jnp.ones(2))))
        65536.0
    """
    state = loss_scale_state(opt_state, "loss_scale")
    return jnp.float32(1) if state is None else state.scale


def loss_scale_state(opt_state: Any, caller: str) -> LossScaleState | None:
    """Return the one loss-scale state in `opt_state`, or None."""
    found = find_states(opt_state, LossScaleState)
    if len(found) > 1:
        where = " and ".join("opt_state" + keystr(path) for path, _ in found)
        raise ValueError(
            f"{caller}: `opt_state` holds {len(found)} loss scales, at {where}, "
            "expected one: a loss has one scale. Put a single dynamic_loss_scale "
            "around the whole optimizer."
        )
    if not found:
        return None
    state = found[0][1]
    # `nnx.Optimizer` keeps each array of a state in a box, which is a tree of one leaf.
    names = [name for name in state._fields if name != "inner_state"]
    return state._replace(**{n: jax.tree.leaves(getattr(state, n))[0] for n in names})


def scale_loss(loss: jax.Array, opt_state: optax.OptState) -> jax.Array:
    """Return the loss times the loss scale in `opt_state`, in float32.

    For loops that call `jax.grad` themselves; `value_and_grad` does it for you.

    Args:
        loss: a floating scalar.
        opt_state: any optimizer state; without a loss scale the loss comes back as is.

    Returns:
        The scaled loss, float32 or wider.

    Raises:
        ValueError: if the loss is not a floating scalar, or the state holds several
            loss scales.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> state = optax_mp.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
        >>> float(optax_mp.scale_loss(jnp.float16(2.0), state))
        131072.0
    """
    _check_loss(loss, "scale_loss")
    state = loss_scale_state(opt_state, "scale_loss")
    return loss if state is None else multiplied(jnp.asarray(loss), state.scale)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return `f(opt_state, *args, **kwargs) -> (value, grads)` for a scaled loss.

    As `jax.value_and_grad`, but the loss is multiplied by the loss scale in `opt_state`
    before it is differentiated. The value is the true loss; the gradients are float32
    and still scaled, ready for `tx.update`.

    Only floating (and complex) arrays in the differentiated arguments are
    differentiated; other leaves, such as counters or an Equinox module's functions,
    get None as their gradient.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`.
        argnums: which arguments to differentiate, counted without `opt_state`.
        has_aux: whether `fun` returns auxiliary data, too.

    Returns:
        The function. With `has_aux` its value is (loss, aux).

    Raises:
        ValueError: when called, if the loss is not a floating scalar, or the state
            holds several loss scales.

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

    def scaled(opt_state: optax.OptState, *args: Any, **kwargs: Any) -> Any:
        state = loss_scale_state(opt_state, "value_and_grad")
        factor = None if state is None else state.scale
        return _differentiated(
            fun, argnums, has_aux, factor, args, kwargs, "value_and_grad"
        )

    return scaled


def dynamic_scale_value_and_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, redo_on_nan: int = 0
) -> Callable[..., Any]:
    """Return `f(*args, loss_scale) -> (new_loss_scale, (value, grads))`.

    For loops that hold a `DynamicLossScale` and no optax state. The gradients, of the
    first argument, are unscaled and float32; the loss scale is adjusted. Where the loss
    or a gradient is not finite (auxiliary output does not count), the same batch is
    tried again at the lower scale, up to `redo_on_nan` times; if the last try fails as
    well, its gradients come back as they are, so check them with `all_finite`.

    Args:
        fun: a function that returns a scalar loss, or (loss, aux) with `has_aux`.
        has_aux: whether `fun` returns auxiliary data, too.
        redo_on_nan: how often to try again.

    Returns:
        The function; `loss_scale` and what `fun` takes besides go by keyword. With
        `has_aux` its value is (loss, aux).

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

    As `dynamic_scale_value_and_grad` without the value; with `has_aux` the result is
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

    def scaled(*args: Any, loss_scale: Any, **kwargs: Any) -> Any:
        scale, (value, grads) = with_value(*args, loss_scale=loss_scale, **kwargs)
        return scale, (grads, value[1]) if has_aux else grads

    return scaled


def _with_retries(
    fun: Callable[..., Any], has_aux: bool, redo_on_nan: int, caller: str
) -> Callable[..., Any]:
    if not (isinstance(redo_on_nan, int) and redo_on_nan >= 0):
        raise ValueError(
            f"{caller}: `redo_on_nan` is {redo_on_nan!r}, expected how often to try "
            "again, 0 or more."
        )

    def attempt(scale: LossScale, args: Any, kwargs: Any) -> Any:
        factor = scale.loss_scale
        value, grads = _differentiated(fun, 0, has_aux, factor, args, kwargs, caller)
        grads = scale.unscale(grads)
        finite = all_finite((value[0] if has_aux else value, grads))
        return finite, (scale.adjust(finite), (value, grads))

    def scaled(*args: Any, loss_scale: Any, **kwargs: Any) -> Any:
        if not (hasattr(loss_scale, "adjust") and hasattr(loss_scale, "unscale")):
            raise TypeError(
                f"{caller}: `loss_scale` is {describe(loss_scale)}, expected a loss "
                "scale such as `optax_mp.DynamicLossScale(2.0**15)`."
            )
        finite, first = attempt(loss_scale, args, kwargs)
        if not redo_on_nan:
            return first
        # Auxiliary output may hold what is no array, and stays out of the loop.
        leaves, treedef = jax.tree.flatten(first)
        dynamic = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

        def filled(arrays: Sequence[Any]) -> Any:
            for i, array in zip(dynamic, arrays, strict=True):
                leaves[i] = array
            return treedef.unflatten(leaves)

        def failed(carry: Any) -> jax.Array:
            tries, finite, _ = carry
            return ~finite & (tries < redo_on_nan)

        def again(carry: Any) -> Any:
            tries, _, arrays = carry
            finite, result = attempt(filled(arrays)[0], args, kwargs)
            found = jax.tree.leaves(result)
            return tries + 1, finite, [found[i] for i in dynamic]

        start = jnp.int32(0), finite, [leaves[i] for i in dynamic]
        return filled(lax.while_loop(failed, again, start)[2])

    return scaled


def _differentiated(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    factor: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: str,
) -> tuple[Any, Any]:
    """Return the true value and the scaled float32 gradients of `fun`."""
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for i in chosen:
        if not -len(args) <= i < len(args):
            raise ValueError(
                f"{caller}: `argnums` has {i}, expected the place of one of the "
                f"{len(args)} positional arguments that came"
                + (" after `opt_state`." if caller == "value_and_grad" else ".")
            )
    # A plain number as an argument is differentiated, one within a model is a setting.
    args = tuple(jnp.asarray(x) if isinstance(x, float) else x for x in args)
    leaves, treedef = jax.tree.flatten([args[i] for i in chosen])
    moved = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def scaled_loss(values: list[Any]) -> tuple[Any, Any]:
        filled = list(leaves)
        for i, value in zip(moved, values, strict=True):
            filled[i] = value
        full = list(args)
        for i, arg in zip(chosen, treedef.unflatten(filled), strict=True):
            full[i] = arg
        value = fun(*full, **kwargs)
        if has_aux and not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError(
                f"{caller}: with `has_aux` the function returned {describe(value)}, "
                "expected a pair (loss, aux)."
            )
        loss = value[0] if has_aux else value
        _check_loss(loss, caller)
        return loss if factor is None else multiplied(loss, factor), value

    gradient = jax.grad(scaled_loss, has_aux=True)
    found, value = gradient([leaves[i] for i in moved])
    grads: list[Any] = [None] * len(leaves)
    for i, grad in zip(moved, found, strict=True):
        grads[i] = (
            grad.astype(at_least_float32(grad.dtype)) if is_floating(grad) else grad
        )
    grads = treedef.unflatten(grads)
    return value, grads[0] if isinstance(argnums, int) else tuple(grads)


def _check_loss(loss: Any, caller: str) -> None:
    is_scalar = is_floating(loss) and loss.shape == ()
    if not (is_scalar or isinstance(loss, float)):
        raise ValueError(
            f"{caller}: the loss is {describe(loss)}, expected a floating scalar; take "
            "its mean or sum, or say `has_aux=True` if the function returns (loss, "
            "aux)."
        )
