"""The category of this package's warnings, and the line that they point to.

A few warnings depend on earlier events in the process, as `event_counts` has them.
`value_and_grad` warns of float16 without a loss scale: params may be float32, with
float16 only inside `amp`, and a function may scale its own loss. If it does so inside
of a `value_and_grad` with a loss scale, the loss is scaled twice. `check_loss_scale`
and the traced update of a loss scale warn if no loss was ever scaled.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Literal

# A warning points to the first line outside of these packages.
_SKIPPED = {"contextlib", "equinox", "flax", "functools", "jax", "optax", "optax_mp"}


class MixedPrecisionWarning(UserWarning):
    """Something that runs, and is probably a mistake.

    Warnings come while a function is traced or an optimizer is set up, never from a
    compiled step. Silence those that you do not want by category and text.

    Example:
        >>> import warnings
        >>> import optax_mp
        >>> warnings.filterwarnings(
        ...     "ignore", "value_and_grad: .*float16", optax_mp.MixedPrecisionWarning
        ... )
    """


def warn(message: str) -> None:
    """Warn at the line of the user's program that led here.

    Python shows a warning once for each such line, unless a filter says otherwise.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back and _package(frame) in _SKIPPED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MixedPrecisionWarning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


Event = Literal[
    "computes in float16",
    "scales its loss",
    "takes scaled gradients",
    "drops micro-batches",
]

_counts: Counter[Event] = Counter()


def count_event(event: Event) -> None:
    """Count something that is done, or traced."""
    _counts[event] += 1


def event_counts() -> Counter[Event]:
    """Return the event counts of this process."""
    return _counts.copy()


def is_loss_scaled(counts: Iterable[Event]) -> bool:
    """Return whether one of these events is that a loss was scaled."""
    return not {"scales its loss", "takes scaled gradients"}.isdisjoint(counts)


def warn_unless_scaled(caller: str, scale: str) -> None:
    """Warn if no loss was scaled in this process.

    Args:
        caller: the public function that the user called.
        scale: what to say of the loss scale.
    """
    if not is_loss_scaled(_counts):
        warn(
            f"{caller}: the loss scale {scale}, and no loss was scaled in this "
            "process, so gradients are probably not scaled. They are divided by the "
            "scale all the same: take them with `optax_mp.value_and_grad(loss)("
            "opt_state, params, ...)`, or of `optax_mp.scale_loss(loss, opt_state)`. "
            "Without float16, `optax_mp.static_loss_scale` skips non-finite steps."
        )
