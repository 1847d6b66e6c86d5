"""The loss-scaling rule, and loss scales as plain values for loops without optax."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_mp._dtypes import at_least_float32
from optax_mp._jax._arrays import is_traced
from optax_mp._tree import PyTree, describe, is_inexact

_FLOAT32 = jnp.finfo(jnp.float32)
_LARGEST_COUNT = 2**31 - 1  # Of an int32; an interval over it is as good as never.
Self = TypeVar("Self", bound="LossScale")


@dataclass(frozen=True)
class ScaleRule:
    """How a dynamic loss scale moves; checked when made.

    Attributes:
        caller: the public function it belongs to, for error messages.
        growth_interval: finite steps in a row after which the scale grows.
        growth_factor: by what it grows.
        backoff_factor: by what it shrinks at an overflow.
        min_scale: where it stops to shrink.
        max_scale: growth that would pass this is not taken.
        hysteresis: overflows before it shrinks; refilled when the scale grows, not by
            every finite step.
        names: what the caller calls these, where it is something else.
    """

    caller: str
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    hysteresis: int = 1
    names: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check every field once."""
        for name in ("growth_interval", "hysteresis"):
            value = self._number(name)
            is_count = 1 <= value < math.inf and value == int(value)
            self._expect(name, is_count, "an integer over 0")
        grow, back = self._number("growth_factor"), self._number("backoff_factor")
        self._expect("growth_factor", 1 < grow < math.inf, "a finite number over 1")
        self._expect("backoff_factor", 0 < back < 1, "a number between 0 and 1")
        for name in ("min_scale", "max_scale"):
            check_scale(self.caller, self._called(name), getattr(self, name))
        self._expect(
            "min_scale",
            self.min_scale <= self.max_scale,
            f"at most `max_scale`, which is {self.max_scale}",
        )

    def check_start(self, name: str, scale: float) -> None:
        """Raise unless a scale to start from is one that the rule can reach."""
        check_scale(self.caller, name, scale)
        scale = float(scale)
        low, high = self._called("min_scale"), self._called("max_scale")
        if not self.min_scale <= scale <= self.max_scale:
            raise ValueError(
                f"{self.caller}: `{name}` is {scale}, expected a scale from `{low}` "
                f"{self.min_scale} to `{high}` {self.max_scale}; widen these."
            )

    def _called(self, name: str) -> str:
        return dict(self.names).get(name, name)

    def _number(self, name: str) -> float:
        return as_number(self.caller, self._called(name), getattr(self, name))

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(
                f"{self.caller}: `{self._called(name)}` is {getattr(self, name)!r}, "
                f"expected {expected}."
            )


def check_scale(caller: str, name: str, scale: float) -> None:
    """Raise unless `scale` and its reciprocal are normal float32 numbers."""
    low, high = float(_FLOAT32.tiny), 1 / float(_FLOAT32.tiny)
    scale = as_number(caller, name, scale)
    if not low <= scale <= high:
        raise ValueError(
            f"{caller}: `{name}` is {scale}, expected a positive finite float32 from "
            f"{low:.3g} to {high:.3g}."
        )


def as_number(caller: str, name: str, value: Any) -> float:
    """Return a setting as a float, or raise an error that names it."""
    is_scalar = jnp.shape(value) == () if hasattr(value, "shape") else True
    if isinstance(value, str) or not hasattr(value, "__float__") or not is_scalar:
        raise TypeError(f"{caller}: `{name}` is {describe(value)}, expected a number.")
    return float(value)


class ScaleCounters(NamedTuple):
    """What the rule moves.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_steps: finite steps in a row, back to 0 when growth is due, an int32
            scalar.
        hysteresis_left: overflows until it shrinks, an int32 scalar.
    """

    scale: jax.Array
    finite_steps: jax.Array
    hysteresis_left: jax.Array


def adjusted(
    rule: ScaleRule, counters: ScaleCounters, finite: jax.Array
) -> ScaleCounters:
    """Return the counters after one step: the rule, whoever holds the scale."""
    scale, finite_steps, left = counters
    # Finite: grow after exactly `growth_interval` of these in a row.
    streak = count_up(finite_steps)
    is_due = streak >= min(rule.growth_interval, _LARGEST_COUNT)
    grown = scale * jnp.float32(rule.growth_factor)
    grows = is_due & (grown <= jnp.float32(rule.max_scale))
    # Overflow: shrink once the hysteresis is spent.
    spent = jnp.maximum(left - 1, 0)
    shrunk = jnp.maximum(
        scale * jnp.float32(rule.backoff_factor), jnp.float32(rule.min_scale)
    )
    after_finite = ScaleCounters(
        jnp.where(grows, grown, scale),
        jnp.where(is_due, 0, streak),
        jnp.where(grows, _count(rule.hysteresis), left),
    )
    after_overflow = ScaleCounters(
        jnp.where(spent == 0, shrunk, scale), jnp.zeros_like(finite_steps), spent
    )
    return ScaleCounters(
        *(
            jnp.where(finite, a, b)
            for a, b in zip(after_finite, after_overflow, strict=True)
        )
    )


def multiplied(tree: PyTree, factor: ArrayLike) -> PyTree:
    """Multiply floating and complex leaves by `factor`, in float32 or wider."""
    return _map_wide(lambda x: x * jnp.asarray(factor, x.dtype), tree)


def divided(tree: PyTree, divisor: ArrayLike) -> PyTree:
    """Divide floating and complex leaves by `divisor`, in float32 or wider."""
    # By its reciprocal: XLA keeps a division apart, in a copy of the gradients.
    return _map_wide(lambda x: x * (1 / jnp.asarray(divisor, x.dtype)), tree)


def _map_wide(function: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    def wide(leaf: Any) -> Any:
        # A loss may come as a plain number.
        if not (is_inexact(leaf) or isinstance(leaf, float)):
            return leaf
        array = jnp.asarray(leaf)
        return function(array.astype(at_least_float32(array.dtype)))

    return jax.tree.map(wide, tree)


class LossScale(Protocol):
    """A loss scale as a value: what the three below have in common."""

    @property
    def loss_scale(self) -> Any:
        """The factor."""
        ...

    def scale(self, tree: PyTree) -> PyTree:
        """Multiply floating leaves by the factor; 16-bit ones become float32."""
        ...

    def unscale(self, tree: PyTree) -> PyTree:
        """Divide floating leaves by the factor; 16-bit ones become float32."""
        ...

    def adjust(self: Self, grads_finite: ArrayLike) -> Self:
        """Return the loss scale for the next step."""
        ...


class _Scaling:
    """The two directions, for values with a `loss_scale`."""

    loss_scale: Any

    def scale(self, tree: PyTree) -> PyTree:
        """Multiply floating leaves by the factor; 16-bit ones become float32."""
        return multiplied(tree, self.loss_scale)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divide floating leaves by the factor; 16-bit ones become float32."""
        return divided(tree, self.loss_scale)


@dataclass(frozen=True)
class NoOpLossScale:
    """No loss scale, for code that is written for one.

    What is scaled or unscaled comes back as it is, so the code computes what it would
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
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Return `tree`."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Return itself."""
        del grads_finite
        return self


@dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """A loss scale that stays.

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
        """Check a concrete factor and bring it to float32."""
        _set_scale(self, "StaticLossScale")

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Return itself."""
        del grads_finite
        return self


@dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """A loss scale that grows while gradients are finite and shrinks when not.

    Attributes:
        loss_scale: the factor, a float32 scalar.
        counter: finite steps in a row, an int32 scalar.
        period: how many of them make it grow.
        factor: by what it grows and shrinks.
        min_loss_scale: where it stops to shrink; may be under 1.

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
        """Check the settings once and bring everything to its dtype."""
        rule = self._rule()
        _set_scale(self, "DynamicLossScale")
        if not is_traced(self.loss_scale):
            rule.check_start("loss_scale", float(self.loss_scale))
        if not is_traced(self.counter):
            as_number("DynamicLossScale", "counter", self.counter)
        object.__setattr__(self, "counter", jnp.asarray(self.counter, jnp.int32))
        settings = (("period", int), ("factor", float), ("min_loss_scale", float))
        for name, kind in settings:
            object.__setattr__(self, name, kind(getattr(self, name)))

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Return the loss scale for the next step."""
        before = ScaleCounters(self.loss_scale, self.counter, jnp.int32(1))
        after = adjusted(self._rule(), before, jnp.asarray(grads_finite))
        structure = jax.tree.structure(self)
        return structure.unflatten([after.scale, after.finite_steps])

    def _rule(self) -> ScaleRule:
        factor = as_number("DynamicLossScale", "factor", self.factor)
        return ScaleRule(
            "DynamicLossScale",
            growth_interval=self.period,
            growth_factor=self.factor,
            backoff_factor=1 / factor if factor else 0.0,
            min_scale=self.min_loss_scale,
            max_scale=1 / float(_FLOAT32.tiny),
            names=(
                ("growth_interval", "period"),
                ("growth_factor", "factor"),
                ("backoff_factor", "factor"),
                ("min_scale", "min_loss_scale"),
            ),
        )


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
        for name, item in zip(
            arrays + tuple(static), (*leaves, *settings), strict=True
        ):
            object.__setattr__(value, name, item)
        return value

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


_register(NoOpLossScale)
_register(StaticLossScale, "loss_scale")
_register(DynamicLossScale, "loss_scale", "counter")


def _set_scale(value: Any, caller: str) -> None:
    scale = value.loss_scale
    if not is_traced(scale):
        check_scale(caller, "loss_scale", scale)
    object.__setattr__(value, "loss_scale", jnp.asarray(scale, jnp.float32))


def start_counters(rule: ScaleRule, scale: float) -> ScaleCounters:
    """Return the counters before the first step."""
    return ScaleCounters(jnp.float32(scale), jnp.int32(0), _count(rule.hysteresis))


def count_up(count: jax.Array) -> jax.Array:
    """Return `count` + 1, staying at the largest integer."""
    return jnp.asarray(optax.safe_increment(count))


def _count(value: int) -> jax.Array:
    return jnp.int32(min(int(value), _LARGEST_COUNT))
