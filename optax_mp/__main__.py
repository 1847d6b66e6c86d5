"""`python -m optax_mp`: train a small transformer in several precisions."""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import jax

from optax_mp._demo import (
    DEFAULTS,
    RUNS,
    Corpus,
    Report,
    Result,
    Settings,
    make_corpus,
    read_text,
    train,
)

BAR_WIDTH = 30
# Losses this close count as the same. By default, float32 runs with other seeds end up
# to 0.007 apart, and naive bfloat16 ends more than 0.06 above them.
SAME_LOSS = 0.02


def main(argv: Sequence[str] | None = None, defaults: Settings = DEFAULTS) -> int:
    """Run the demo with the arguments of a command line; return the exit status."""
    parser = make_parser(defaults)
    options = parser.parse_args(argv)
    try:
        settings = replace(defaults, steps=options.steps, seed=options.seed)
        corpus = make_corpus(read_text(options.text), settings.context)
    except ValueError as error:
        parser.error(str(error))
    stream = sys.stderr if options.json else sys.stdout
    print(introduction(settings, corpus), file=stream, flush=True)
    report = make_progress(stream, settings.steps)
    try:
        results = [train(run, settings, corpus, report) for run in RUNS]
    except KeyboardInterrupt:
        print("\ninterrupted", file=stream)
        return 130
    if options.json:
        print(as_json(settings, results))
    else:
        print(f"\n{as_table(results)}\n\n{verdict(results)}")
    return 0


def make_parser(defaults: Settings) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_mp",
        description="Train a small transformer on characters, from the same weights, "
        "on the same batches and with the same AdamW, in several precisions.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=defaults.steps,
        help="training steps of each run (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=defaults.seed,
        help="of weights and batches (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="what to train on (default: the help texts of Python)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the results as JSON, and the progress to stderr",
    )
    return parser


def introduction(settings: Settings, corpus: Corpus) -> str:
    """Return what is about to be done, in a line or two."""
    return (
        f"Training a {settings.layer_count}-layer transformer on "
        f"{corpus.train.size} characters, on {jax.default_backend()},\n"
        f"{settings.steps} steps in each of {len(RUNS)} ways."
    )


def make_progress(stream: TextIO, steps: int) -> Report:
    """Return what shows the progress: a bar on a terminal, else a line each tenth."""
    is_live = stream.isatty()
    line_width = shutil.get_terminal_size().columns - 1
    shown_tenth = 0

    def report(name: str, step: int, loss: float | None) -> None:
        nonlocal shown_tenth
        status = "compiling" if loss is None else f"loss {loss:.3f}"
        if is_live:
            filled = BAR_WIDTH * step // steps
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            # Padded, since each line is to cover the one before it.
            line = f"{name:<15} [{bar}] {step}/{steps} {status}".ljust(79)
            end = "\n" if step == steps else ""
            print("\r" + line[:line_width], end=end, file=stream, flush=True)
            return
        tenth = 10 * step // steps
        if tenth != shown_tenth and loss is not None:
            print(f"{name}: step {step}/{steps}, {status}", file=stream, flush=True)
        shown_tenth = tenth

    return report


def as_table(results: Sequence[Result]) -> str:
    """Return the results as a table for people."""
    rows = [("run", "held-out loss", "bytes a weight", "ms a step", "skipped")]
    rows += [
        (
            result.name,
            f"{result.held_out_loss:.4f}",
            f"{result.bytes_per_weight:.2f}",
            f"{result.ms_per_step:.1f}",
            "-" if result.skipped_steps is None else str(result.skipped_steps),
        )
        for result in results
    ]
    titles, *lines = (
        f"{name:<15} {loss:>14} {size:>15} {speed:>10} {skipped:>8}"
        for name, loss, size, speed, skipped in rows
    )
    return "\n".join([titles, "-" * len(titles), *lines])


def verdict(results: Sequence[Result]) -> str:
    """Return in one sentence how the runs compare with the first."""
    first, *others = results

    def compared(result: Result) -> str:
        gap = result.held_out_loss - first.held_out_loss
        if not math.isfinite(gap):
            return f"{result.name} diverged"
        if abs(gap) < SAME_LOSS:
            return f"{result.name} matches it ({gap:+.3f})"
        return f"{result.name} is {abs(gap):.3f} {'worse' if gap > 0 else 'better'}"

    return f"Against {first.name}: {', '.join(map(compared, others))}."


def as_json(settings: Settings, results: Sequence[Result]) -> str:
    """Return settings and results for programs; a loss that is not finite is null."""

    def row(result: Result) -> dict[str, Any]:
        is_finite = math.isfinite(result.held_out_loss)
        loss = result.held_out_loss if is_finite else None
        return asdict(result) | {"held_out_loss": loss}

    return json.dumps(
        {
            "settings": asdict(settings),
            "backend": jax.default_backend(),
            "runs": [row(result) for result in results],
            "verdict": verdict(results),
        },
        indent=2,
        allow_nan=False,
    )


if __name__ == "__main__":
    sys.exit(main())
