"""The demo's losses, bytes and curves, for several seeds and learning rates.

    python benchmarks/demo.py                    # what `python -m optax_mp` trains
    python benchmarks/demo.py --naive-and-masters --peaks 1e-3 1e-2 --seeds 0 1
    python benchmarks/demo.py --json FILE        # the table as data, with the curves

Losses are of held-out text, in nats per character. "above float32" is the distance to
the float32 run of the same seed and learning rate.
"""

import argparse
import sys
from dataclasses import replace

import jax
import record

from optax_mp._demo.runs import DEFAULT_DTYPES, FLOAT32, Run, runs_of
from optax_mp._demo.settings import DEFAULTS, Settings
from optax_mp._demo.text import make_corpus, read_text
from optax_mp._demo.train import Moment, Result, train


def rows_of(result: Result, settings: Settings, first: Result) -> list[record.Row]:
    """Return a run as a row for each seed."""
    return [
        {
            "run": result.name,
            "peak learning rate": settings.peak_learning_rate,
            "seed": seed,
            "held-out loss": loss,
            "above float32": loss - float32_loss,
            "bytes per weight": result.bytes_per_weight,
            "skipped, all seeds": result.skipped_steps,
            "curve": [curve.steps, curve.losses],
        }
        for seed, loss, float32_loss, curve in zip(
            settings.seeds,
            result.held_out_losses,
            first.held_out_losses,
            result.curves,
            strict=True,
        )
    ]


def measure(runs: tuple[Run, ...], settings: Settings) -> list[record.Row]:
    """Train in all ways, float32 first; return a row for each."""
    corpus = make_corpus(read_text(None), settings.context)

    def follow(name: str, moment: Moment) -> None:
        if moment.is_last:
            print(f"{name}, peak {settings.peak_learning_rate}", file=sys.stderr)

    results = [train(run, settings, corpus, follow) for run in runs]
    return [row for each in results for row in rows_of(each, settings, results[0])]


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=DEFAULTS.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=DEFAULTS.seeds)
    parser.add_argument(
        "--peaks", type=float, nargs="+", default=[DEFAULTS.peak_learning_rate]
    )
    parser.add_argument(
        "--naive-and-masters",
        action="store_true",
        help="only float32, and bfloat16 without masters and with",
    )
    record.add_option(parser)
    args = parser.parse_args()
    runs = runs_of(DEFAULT_DTYPES, None)
    if args.naive_and_masters:
        runs = runs_of(("bf16",), ("full",))
    assert runs[0] == FLOAT32
    rows = []
    for peak in args.peaks:
        settings = replace(DEFAULTS, steps=args.steps, peak_learning_rate=peak)
        rows += measure(runs, replace(settings, seeds=tuple(args.seeds)))
    tables = {f"after {args.steps} steps": rows}
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
