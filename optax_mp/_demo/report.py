"""How the demo reports its results: as a table, a verdict, and JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from optax_mp._demo.settings import Settings
from optax_mp._demo.train import Result
from optax_mp._table import align_columns

TITLES = (
    "run",
    "held-out loss",
    "above float32",
    "bytes/weight",
    "ms/step",
    "skipped",
)
# Losses this close count as the same.
SAME_LOSS = 0.02


def cells_of(result: Result, first: Result) -> tuple[str, ...]:
    """Return the cells of a result's row under `TITLES`."""
    skipped = result.skipped_steps
    return (
        result.name,
        f"{result.held_out_loss:.4f}",
        "-" if result is first else in_range(gaps_of(result, first)),
        f"{result.bytes_per_weight:.2f}",
        f"{result.ms_per_step:.1f}",
        "-" if skipped is None else str(skipped),
    )


def gaps_of(result: Result, first: Result) -> list[float]:
    """Return for each seed how far the held-out loss is above the first run's."""
    pairs = zip(result.held_out_losses, first.held_out_losses, strict=True)
    return [loss - other for loss, other in pairs]


def in_range(gaps: Sequence[float]) -> str:
    """Return the least and the largest of some numbers, or the only one."""
    if not all(map(math.isfinite, gaps)):
        return "-"
    least, most = f"{min(gaps):+.3f}", f"{max(gaps):+.3f}"
    return least if least == most else f"{least}..{most}"


def as_table(results: Sequence[Result]) -> str:
    """Return the results as a table for people, within 80 columns."""
    titles, *lines = align_columns(
        [TITLES, *(cells_of(each, results[0]) for each in results)], left=1
    )
    return "\n".join([titles, "-" * len(titles), *lines])


def verdict(results: Sequence[Result]) -> str:
    """Return in a sentence or two how the runs compare with the first."""
    first, *others = results
    if not math.isfinite(first.held_out_loss):
        return f"{first.name} itself diverged: there is nothing to compare with."
    sentence = ", ".join(compare_losses(result, first) for result in others)
    start = f"Against {first.name} ({losses_of(first)}): {sentence}."
    leanest = min(
        (result for result in others if matches(result, first)),
        key=lambda result: result.bytes_per_weight,
        default=first,
    )
    if leanest.bytes_per_weight >= first.bytes_per_weight:
        return start
    return (
        f"{start} The smallest that matches it is {leanest.name}, with "
        f"{leanest.bytes_per_weight:.1f} bytes per weight against "
        f"{first.bytes_per_weight:.1f}."
    )


def losses_of(result: Result) -> str:
    """Return the held-out loss, and how far seeds lie apart if there are several."""
    losses = result.held_out_losses
    mean = f"{result.held_out_loss:.3f}"
    if len(losses) == 1:
        return mean
    return f"{mean}, {len(losses)} seeds {max(losses) - min(losses):.3f} apart"


def compare_losses(result: Result, first: Result) -> str:
    """Return how the loss of a run compares with that of the first."""
    gap = result.held_out_loss - first.held_out_loss
    if not math.isfinite(gap):
        step = diverged_at(result)
        return f"{result.name} diverged" + (f" by step {step}" if step else "")
    if matches(result, first):
        return f"{result.name} matches it ({gap:+.3f})"
    return f"{result.name} is {abs(gap):.3f} {'worse' if gap > 0 else 'better'}"


def diverged_at(result: Result) -> int | None:
    """Return the first step by which the loss of a seed was NaN for good, or None."""
    lost = [each for each in result.curves if math.isnan(each.losses[-1])]
    return min((each.steps[-1] for each in lost), default=None)


def matches(result: Result, first: Result) -> bool:
    """Return whether a mean loss is that of the first run, but for chance."""
    return abs(result.held_out_loss - first.held_out_loss) < SAME_LOSS


def as_json(
    settings: Settings, results: Sequence[Result], environment: dict[str, Any]
) -> str:
    """Return settings and results as JSON; what is not finite is null."""
    report = {
        "settings": asdict(settings),
        **environment,
        "runs": [
            asdict(result) | {"held_out_loss": result.held_out_loss}
            for result in results
        ],
        "verdict": verdict(results),
    }
    return json.dumps(finite_or_none(report), indent=2, allow_nan=False)


def finite_or_none(value: Any) -> Any:
    """Return a tree of plain values with None for infinity and NaN, for JSON."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    is_nonfinite = isinstance(value, float) and not math.isfinite(value)
    return None if is_nonfinite else value
