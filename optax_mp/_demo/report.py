"""How the demo reports its results: as a table, a verdict, and JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from optax_mp._demo.progress import power_of_two
from optax_mp._demo.settings import Settings
from optax_mp._demo.train import Result
from optax_mp._table import align_columns

TITLES = ("run", "held-out loss", "bytes per weight", "ms per step", "scale", "skipped")
# Losses this close count as the same. By default, float32 runs with other seeds end up
# to 0.007 apart, and naive bfloat16 ends more than 0.06 above them.
SAME_LOSS = 0.02


def cells_of(result: Result) -> tuple[str, ...]:
    """Return the cells of a result's row under `TITLES`."""
    scale, skipped = result.loss_scale, result.skipped_steps
    return (
        result.name,
        f"{result.held_out_loss:.4f}",
        f"{result.bytes_per_weight:.2f}",
        f"{result.ms_per_step:.1f}",
        "-" if scale is None else power_of_two(scale),
        "-" if skipped is None else str(skipped),
    )


def as_table(results: Sequence[Result]) -> str:
    """Return the results as a table for people, within 80 columns."""
    titles, *lines = align_columns([TITLES, *map(cells_of, results)], left=1)
    return "\n".join([titles, "-" * len(titles), *lines])


def verdict(results: Sequence[Result]) -> str:
    """Return in a sentence or two how the runs compare with the first."""
    first, *others = results
    if not math.isfinite(first.held_out_loss):
        return f"{first.name} itself diverged: there is nothing to compare with."
    sentence = ", ".join(compare_losses(result, first) for result in others)
    start = f"Against {first.name} ({first.held_out_loss:.3f}): {sentence}."
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
    """Return the step by which a run's loss was NaN for good, or None."""
    last = result.curve.losses[-1]
    return result.curve.steps[-1] if math.isnan(last) else None


def matches(result: Result, first: Result) -> bool:
    """Return whether a loss equals that of the first run, but for chance."""
    return abs(result.held_out_loss - first.held_out_loss) < SAME_LOSS


def as_json(
    settings: Settings, results: Sequence[Result], environment: dict[str, Any]
) -> str:
    """Return settings and results as JSON; what is not finite is null."""
    report = {
        "settings": asdict(settings),
        **environment,
        "runs": [asdict(result) for result in results],
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
