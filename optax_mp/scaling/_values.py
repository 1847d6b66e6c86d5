"""Loss scales as plain values, for loops without an optimizer state."""

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_mp._float16 import report
from optax_mp._jax._arrays import is_traced
from optax_mp._tree import PyTree
from optax_mp.scaling._rule import ScaleCounters, ScaleRule, adjust
from optax_mp.scaling._settings import (
    LARGEST_SCALE,
    check_count,
    check_growth_factor,
    check_number,
    check_scale,
)
from optax_mp.scaling._unscale import divide, multiply


@dataclass(frozen=True)
class NoOpLossScale:
    """No loss scaling, for code that expects a loss scale.

    `scale` and `unscale` return what they are given, so the code computes what it would
    without a loss scale.

    Example:
        >>> import optax_mp
        >>> none = optax_mp.NoOpLossScale()
        >>> none.scale(3.0), none.unscale(3.0), none.adjust(False) == none
        (3.0, 3.0, True)
    """

    @property
    def loss_scale(self) -> int:
        """The factor, 1."""
        return 1

    def scale(self, tree: PyTree) -> PyTree:
        """Return `tree`."""
        report("scales its loss")
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Return `tree`."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Return this loss scale."""
        del grads_finite
        return self


class _Scaler:
    """Scales trees by `self.loss_scale`."""

    loss_scale: Any

    def scale(self, tree: PyTree) -> PyTree:
        """Multiply floating leaves by the factor; 16-bit ones become float32."""
        report("scales its loss")
        return multiply(tree, self.loss_scale)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divide floating leaves by the factor; 16-bit ones become float32."""
        return divide(tree, self.loss_scale)


@dataclass(frozen=True)
class StaticLossScale(_Scaler):
    """A constant loss scale.

    Attributes:
        loss_scale: the factor, a float32 scalar.

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

    def __post_init__(self) -> None:
        """Check the factor, unless it is traced, and cast it to float32."""
        if not is_traced(self.loss_scale):
            check_scale("StaticLossScale: `loss_scale`", self.loss_scale)
        _set_fields(self, loss_scale=jnp.asarray(self.loss_scale, jnp.float32))

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Return this loss scale."""
        del grads_finite
        return self


@dataclass(frozen=True)
class DynamicLossScale(_Scaler):
    """A loss scale that grows while gradients are finite and shrinks if they are not.

    Attributes:
        loss_scale: the factor, a float32 scalar.
        counter: finite steps in a row, an int32 scalar.
        period: finite steps in a row after which it grows.
        factor: the factor by which it grows and shrinks.
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

    def __post_init__(self) -> None:
        """Check all fields that are not traced, and cast each to its dtype."""
        argument = "DynamicLossScale: `{}`".format
        period = check_count(argument("period"), self.period)
        factor = check_growth_factor(argument("factor"), self.factor)
        low = check_scale(argument("min_loss_scale"), self.min_loss_scale)
        if not is_traced(self.loss_scale):
            check_number(
                argument("loss_scale"),
                check_scale(argument("loss_scale"), self.loss_scale),
                f"at least `min_loss_scale`, which is {low}",
                lambda scale: scale >= low,
            )
        if not is_traced(self.counter):
            check_number(argument("counter"), self.counter, "a number", lambda _: True)
        _set_fields(
            self,
            loss_scale=jnp.asarray(self.loss_scale, jnp.float32),
            counter=jnp.asarray(self.counter, jnp.int32),
            period=int(period),
            factor=factor,
            min_loss_scale=low,
        )

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Return the loss scale for the next step."""
        rule = ScaleRule(
            growth_interval=self.period,
            growth_factor=self.factor,
            backoff_factor=1 / self.factor,
            min_scale=self.min_loss_scale,
            max_scale=LARGEST_SCALE,
        )
        # Hysteresis of 1: this class has none, so every overflow shrinks the scale.
        before = ScaleCounters(self.loss_scale, self.counter, jnp.int32(1))
        after = adjust(rule, before, jnp.asarray(grads_finite))
        # Not by the constructor, whose checks have run already.
        structure = jax.tree.structure(self)
        return structure.unflatten([after.scale, after.finite_count])


def _set_fields(value: Any, **items: Any) -> None:
    """Set fields of a frozen dataclass, while it is being built."""
    for name, item in items.items():
        object.__setattr__(value, name, item)


def _register(cls: type, *arrays: str) -> None:
    """Register a dataclass as a pytree of its `arrays`; its other fields are static.

    JAX rebuilds values with tracers and placeholders in them, so rebuilding must not
    run the checks of `__post_init__`, as `jax.tree_util.register_dataclass` would.
    """
    static = [field.name for field in fields(cls) if field.name not in arrays]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves = [getattr(value, name) for name in arrays]
        return leaves, tuple(getattr(value, name) for name in static)

    def unflatten(settings: tuple[Any, ...], leaves: Any) -> Any:
        value = object.__new__(cls)
        _set_fields(value, **dict(zip(arrays, leaves, strict=True)))
        _set_fields(value, **dict(zip(static, settings, strict=True)))
        return value

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


_register(NoOpLossScale)
_register(StaticLossScale, "loss_scale")
_register(DynamicLossScale, "loss_scale", "counter")
