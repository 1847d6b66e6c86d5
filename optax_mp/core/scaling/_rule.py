"""How a dynamic loss scale grows and shrinks, as a pure function of its counters.

The checks of its settings are also here.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_mp.core.jax_api._arrays import describe, is_traced

# Between these both a scale and its reciprocal are normal float32 numbers: CPUs flush
# smaller ones to zero.
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)
LARGEST_SCALE = 1 / SMALLEST_SCALE


# For each setting, what errors say and how it is tested. Other settings are scales.
_COUNT = "an integer greater than 0", lambda x: 1 <= x < math.inf and x == int(x)
_GROWTH = "a finite number greater than 1", lambda x: 1 < x < math.inf
_SCALE = (
    f"a positive finite float32 from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}",
    lambda x: SMALLEST_SCALE <= x <= LARGEST_SCALE,
)
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "growth_interval": _COUNT,
    "period": _COUNT,
    "hysteresis": _COUNT,
    "counter": ("a number", lambda _: True),
    "redo_on_nan": ("an integer, 0 or more", lambda x: x >= 0 and x == int(x)),
    "growth_factor": _GROWTH,
    "factor": _GROWTH,
    "backoff_factor": ("a number between 0 and 1", lambda x: 0 < x < 1),
}


def check_settings(caller: str, **settings: Any) -> None:
    """Raise an error that names the first setting out of range."""
    for name, value in settings.items():
        check_number(f"{caller}: `{name}`", value, *_RANGES.get(name, _SCALE))


def check_number(
    argument: str, value: Any, expected: str, accept: Callable[[float], bool]
) -> None:
    """Raise an error that says what is `expected`, unless `value` is acceptable."""
    caller, _, name = argument.partition(": ")
    wanted = f"{caller}: expected {name} to be {expected}"
    if getattr(value, "shape", ()) or not hasattr(value, "__float__"):
        raise TypeError(f"{wanted}, got {describe(value)}.")
    if is_traced(value):
        raise TypeError(
            f"{wanted}, known before the step, got a traced {describe(value)}; name it "
            "in `static_args` of `optax.inject_hyperparams`."
        )
    if not accept(float(value)):
        raise ValueError(f"{wanted}, got {value}.")


# The largest int32. A longer interval would not end in practice.
LARGEST_COUNT = 2**31 - 1


class ScaleRule(NamedTuple):
    """The settings of a dynamic loss scale, already checked.

    Attributes:
        growth_interval: finite steps in a row until the scale grows.
        growth_factor: multiplies the scale when it grows.
        backoff_factor: multiplies it when it shrinks.
        min_scale: its lower bound.
        max_scale: its upper bound; growth that would pass it does not happen.
        hysteresis: overflows until the scale shrinks; from then on it shrinks at each.
    """

    growth_interval: int
    growth_factor: float
    backoff_factor: float
    min_scale: float
    max_scale: float
    hysteresis: int = 1


# `hysteresis_left` from an overflow at `min_scale` until growth is due. The state does
# not hold `min_scale`, so this is how it says that the scale is at its floor.
AT_FLOOR = -1


class Counters(NamedTuple):
    """What the rule moves, by the names that `LossScaleState` has for them.

    Attributes:
        scale: float32 `[]`, the loss scale.
        finite_count: int32 `[]`, finite steps in a row since growth was last due.
        hysteresis_left: int32 `[]`, overflows until the scale shrinks, or `AT_FLOOR`.
    """

    scale: jax.Array
    finite_count: jax.Array
    hysteresis_left: jax.Array


def adjust(
    rule: ScaleRule, counters: Counters, finite: jax.Array, overflowed: jax.Array
) -> Counters:
    """Return the counters after a step.

    If the loss itself is not finite, a step is not finite and not an overflow. It keeps
    the scale, and restarts the count of finite steps.

    Args:
        rule: the settings.
        counters: the counters before the step.
        finite: bool `[]`, whether all gradients of the step were finite.
        overflowed: bool `[]`, whether the scale was too large for them.
    """
    scale, finite_count, hysteresis_left = counters
    # Counted up before it is compared: growth comes after exactly `growth_interval`
    # finite steps, as in torch. (flax compares first and needs one step more.)
    finite_count = jnp.where(finite, optax.safe_increment(finite_count), 0)
    is_due = finite_count >= min(int(rule.growth_interval), LARGEST_COUNT)
    # Not clamped to `max_scale`: if that is not a power of two, the scale would not be
    # one either, and would round every gradient from then on.
    grown = scale * jnp.float32(rule.growth_factor)
    grows = is_due & (grown <= jnp.float32(rule.max_scale))
    # Stays at 0, so that each further overflow also shrinks the scale.
    spent = jnp.maximum(hysteresis_left - 1, 0)
    hysteresis_left = jnp.where(overflowed, spent, hysteresis_left)
    shrinks = overflowed & (hysteresis_left == 0)
    shrunk = scale * jnp.float32(rule.backoff_factor)
    # Remembered until growth is due.
    is_stuck = shrinks & (shrunk < jnp.float32(rule.min_scale))
    hysteresis_left = jnp.where(is_stuck, AT_FLOOR, hysteresis_left)
    scale = jnp.where(grows, grown, jnp.where(shrinks, shrunk, scale))
    # The lower bound keeps the scale from reaching 0, where no growth helps. The scale
    # is above the upper one only if a run goes on with other settings.
    scale = jnp.clip(scale, jnp.float32(rule.min_scale), jnp.float32(rule.max_scale))
    # Refilled also where the scale has no room to grow: a run at `max_scale` would
    # otherwise spend its hysteresis once and never get it back.
    hysteresis = min(int(rule.hysteresis), LARGEST_COUNT)
    hysteresis_left = jnp.where(is_due, hysteresis, hysteresis_left)
    finite_count = jnp.where(is_due, 0, finite_count)
    return Counters(scale, finite_count, jnp.minimum(hysteresis_left, hysteresis))
