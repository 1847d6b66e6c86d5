"""The demo's losses, bytes and curves, for several seeds and learning rates.

    python benchmarks demo                    # what examples/demo/demo.py trains
    python benchmarks demo --naive-and-masters --peaks 1e-3 1e-2 --seeds 0 1
    python benchmarks demo --json FILE        # the table as data, with the curves

Losses are of held-out text, in nats per character. "above float32" is the distance to
the float32 run of the same seed and learning rate.
"""

import argparse
import sys
from dataclasses import replace

import jax
import record
from the_demo import (
    FORMS,
    Form,
    Result,
    Settings,
    calls,
    compile_form,
    read_corpus,
    train,
)


def rows_of(result: Result, settings: Settings, first: Result) -> list[record.Row]:
    """Return a run as a row for each seed."""
    steps = [stop for _, stop in calls(settings.steps)]
    return [
        {
            "run": result.form.name,
            "peak learning rate": settings.peak_learning_rate,
            "seed": seed,
            "held-out loss": loss,
            "above float32": loss - float32_loss,
            "bytes per weight": result.bytes_per_weight,
            "skipped, all seeds": result.skipped,
            "curve": [steps, curve],
        }
        for seed, loss, float32_loss, curve in zip(
            settings.seeds, result.losses, first.losses, result.curves, strict=True
        )
    ]


def measure(forms: tuple[Form, ...], settings: Settings) -> list[record.Row]:
    """Train in all forms, float32 first; return a row for each and seed."""
    corpus, results = read_corpus(settings.context), []
    for form in forms:
        print(f"{form.name}, peak {settings.peak_learning_rate}", file=sys.stderr)
        program = compile_form(form, settings, corpus)
        results.append(train(program, settings, corpus))
    return [row for each in results for row in rows_of(each, settings, results[0])]


def main() -> None:
    """Read the options and print the table."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=defaults.seeds)
    parser.add_argument(
        "--peaks", type=float, nargs="+", default=[defaults.peak_learning_rate]
    )
    parser.add_argument(
        "--naive-and-masters",
        action="store_true",
        help="only float32, and bfloat16 without masters and with",
    )
    record.add_option(parser)
    args = parser.parse_args()
    forms = FORMS[:3] if args.naive_and_masters else FORMS
    rows = []
    for peak in args.peaks:
        settings = replace(defaults, steps=args.steps, peak_learning_rate=peak)
        rows += measure(forms, replace(settings, seeds=tuple(args.seeds)))
    tables = {f"after {args.steps} steps": rows}
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
