"""Loss scales as values, and gradients with retries, for loops without a state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_mp.core._warnings import record_event
from optax_mp.core.jax_api import _arrays
from optax_mp.core.scaling import _rule
from optax_mp.core.scaling._gradients import gradients_of
from optax_mp.core.scaling._rule import adjust
from optax_mp.core.scaling._unscale import divide, multiply
from optax_mp.core.trees import _tree
from optax_mp.core.wrappers._mistakes import refuse_overwritten

# What each field is cast to.
_CASTS: dict[str, Callable[[Any], Any]] = {
    "loss_scale": partial(jnp.asarray, dtype=jnp.float32),
    "counter": partial(jnp.asarray, dtype=jnp.int32),
    "period": int,
    "factor": float,
    "min_loss_scale": float,
}


class _LossScale:
    """Scales trees by `self.loss_scale`, and does not adjust it."""

    loss_scale: Any

    def __post_init__(self) -> None:
        """Check all fields that are not traced, and cast each to its dtype."""
        known = {name: x for name, x in vars(self).items() if not _arrays.is_traced(x)}
        _rule.check_settings(type(self).__name__, **known)
        # The dataclass is frozen.
        vars(self).update({name: _CASTS[name](x) for name, x in vars(self).items()})

    def scale(self, tree: _tree.PyTree) -> _tree.PyTree:
        """Multiply floating leaves by the factor; 16-bit ones become float32."""
        record_event("scales its loss")
        return multiply(tree, self.loss_scale)

    def unscale(self, tree: _tree.PyTree) -> _tree.PyTree:
        """Divide floating leaves by the factor; 16-bit ones become float32.

        The next values of Flax's fp8 scales, which are not gradients, raise an error.
        """
        refuse_overwritten(tree, f"{type(self).__name__}.unscale")
        return divide(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> Any:
        """Return the loss scale for the next step; `grads_finite` is bool `[]`."""
        return self


@dataclass(frozen=True)
class NoOpLossScale(_LossScale):
    """No loss scaling, for code that expects a loss scale.

    `scale` and `unscale` return their argument.

    Example:
        >>> import optax_mp
        >>> none = optax_mp.NoOpLossScale()
        >>> none.scale(3.0), none.unscale(3.0), none.adjust(False) == none
        (3.0, 3.0, True)
    """

    loss_scale = 1  # the factor

    def scale(self, tree: _tree.PyTree) -> _tree.PyTree:
        """Return `tree`."""
        return tree

    def unscale(self, tree: _tree.PyTree) -> _tree.PyTree:
        """Return `tree`."""
        return tree


@dataclass(frozen=True)
class StaticLossScale(_LossScale):
    """A constant loss scale.

    Attributes:
        loss_scale: float32 `[]`, the factor.

    Raises:
        ValueError: if the factor is not positive and finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> scale = optax_mp.StaticLossScale(1024.0)
        >>> float(scale.scale(jnp.float16(2.0))), float(scale.adjust(False).loss_scale)
        (2048.0, 1024.0)
    """

    loss_scale: Any


@dataclass(frozen=True)
class DynamicLossScale(_LossScale):
    """A loss scale that grows while gradients are finite and shrinks if they are not.

    Attributes:
        loss_scale: float32 `[]`, the factor.
        counter: int32 `[]`, finite steps in a row.
        period: finite steps in a row until it grows.
        factor: multiplies it when it grows, divides it when it shrinks.
        min_loss_scale: its lower bound; may be less than 1.

    Raises:
        ValueError: if a factor, `period` or `min_loss_scale` is out of range.

    Example:
        >>> import optax_mp
        >>> scale = optax_mp.DynamicLossScale(8.0, period=2)
        >>> for finite in (True, True, False, False):
        ...     scale = scale.adjust(finite)
        ...     print(float(scale.loss_scale))
        8.0
        16.0
        8.0
        4.0
    """

    loss_scale: Any
    counter: Any = 0
    period: int = 2000
    factor: float = 2.0
    min_loss_scale: float = 1.0

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Return the loss scale for the next step; `grads_finite` is bool `[]`."""
        shrink, least = 1 / self.factor, self.min_loss_scale
        rule = _rule.ScaleRule(
            self.period, self.factor, shrink, least, _rule.LARGEST_SCALE
        )
        # Hysteresis of 1: this class has none, so every overflow shrinks the scale.
        before = _rule.Counters(
            self.loss_scale, self.counter, hysteresis_left=jnp.int32(1)
        )
        finite = jnp.asarray(grads_finite)
        after = adjust(rule, before, finite, ~finite)
        # Not by the constructor, whose checks have run already.
        return jax.tree.structure(self).unflatten([after.scale, after.finite_count])


def _register(cls: type, count: int) -> None:
    """Register a dataclass as a pytree of its first fields; the others are static.

    JAX rebuilds values with tracers and placeholders in them, so rebuilding must not
    run the checks of `__post_init__`, as `jax.tree_util.register_dataclass` would.
    """

    def flatten(value: Any) -> tuple[Any, Any]:
        items = tuple(vars(value).values())
        return items[:count], items[count:]

    def unflatten(settings: Any, leaves: Any) -> Any:
        value = object.__new__(cls)
        # Each class has the first of these fields, in this order.
        vars(value).update(zip(_CASTS, (*leaves, *settings), strict=False))
        return value

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


_register(NoOpLossScale, 0)
_register(StaticLossScale, 1)
_register(DynamicLossScale, 2)


def dynamic_scale_value_and_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, redo_on_nan: int = 0
) -> Callable[..., Any]:
    """Return `f(*args, loss_scale) -> (new_loss_scale, (value, grads))`.

    It is for loops that hold a `DynamicLossScale` and no optimizer state. The gradients
    are for the first argument, float32 and unscaled, and the loss scale is adjusted. If
    the loss or a gradient is not finite, the same batch is tried again with the lower
    scale, up to `redo_on_nan` times. If the last try fails as well, its gradients are
    returned, so check them with `all_finite`.

    Auxiliary outputs may be infinite or NaN; they cause no retry. With `redo_on_nan`
    they must be arrays, because JAX carries them through a loop.

    Args:
        fun: a function that returns a loss, floating `[]`, or (loss, aux) with
            `has_aux`.
        has_aux: whether `fun` also returns auxiliary data.
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
        fun: a function that returns a loss, floating `[]`, or (loss, aux) with
            `has_aux`.
        has_aux: whether `fun` also returns auxiliary data.
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


def _with_retries(fun: Any, has_aux: bool, redo_on_nan: int, caller: str) -> Any:
    differentiate = gradients_of(fun, 0, has_aux, caller)
    _rule.check_settings(caller, redo_on_nan=redo_on_nan)

    def attempt(scale: Any, args: Any, kwargs: Any) -> Any:
        value, grads = differentiate(scale.loss_scale, args, kwargs)
        grads = scale.unscale(_tree.in_float32(grads))
        finite = _tree.all_finite((value[0] if has_aux else value, grads))
        return finite, (scale.adjust(finite), (value, grads))

    def evaluate(*args: Any, loss_scale: Any = None, **kwargs: Any) -> Any:
        if not (hasattr(loss_scale, "adjust") and hasattr(loss_scale, "unscale")):
            raise TypeError(
                f"{caller}: expected `loss_scale` to be a loss scale such as "
                "`optax_mp.DynamicLossScale(2.0**15)`, got "
                f"{_arrays.describe(loss_scale)}; call f(..., loss_scale=loss_scale)."
            )
        first = attempt(loss_scale, args, kwargs)
        if not redo_on_nan:
            return first[1]

        def needs_retry(carry: Any) -> jax.Array:
            tries, (finite, _) = carry
            return ~finite & (tries < redo_on_nan)

        def retry(carry: Any) -> Any:
            tries, (_, (scale, _)) = carry
            return tries + 1, attempt(scale, args, kwargs)

        return lax.while_loop(needs_retry, retry, (jnp.int32(0), first))[1][1]

    return evaluate
