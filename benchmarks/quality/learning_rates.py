"""Which learning rate is best with masters, and which without.

    python benchmarks learning_rates
    python benchmarks learning_rates --seeds 0 1 2 --json FILE

The fine-tuning of `finetune`, shorter and at a constant rate after its warm-up: a small
transformer goes on from a novel to Python code. A cell is the loss of held-out windows
at the end, in nats per character, the mean over seeds. "Best" is the rate of the lowest
loss of the new text. Plain bfloat16 loses the updates that are small against their
weight, and does best at a higher rate.
"""

import argparse
import sys
from dataclasses import replace
from statistics import fmean

import jax
import optax
import record
from finetune import FINE_TUNING, FORMS, PRETRAINING, Run, fine_tune, pretrained

RATES = (1e-4, 3e-4, 1e-3, 2e-3, 3e-3)
NAMES = ("float32", "plain bf16", "masters, FullCopy")
TEXTS = ("the new text", "the old text")


def losses_of(
    run: Run, rate: float, steps: int, seeds: tuple[int, ...], start: optax.Params
) -> tuple[float, ...]:
    """Return the mean losses of both texts after training at a rate."""
    rates = dict.fromkeys(("peak_learning_rate", "final_learning_rate"), rate)
    settings = replace(FINE_TUNING, steps=steps, seeds=seeds, **rates)
    by_seed = fine_tune(run, settings, start, None)["losses"]
    return tuple(map(fmean, zip(*by_seed, strict=True)))


def measure(steps: int, seeds: tuple[int, ...]) -> record.Tables:
    """Return a table of losses for each text: a row a form, a column a rate."""
    start = pretrained(replace(PRETRAINING, steps=5 * steps))
    tables: record.Tables = {f"loss of {text}": [] for text in TEXTS}
    for run in (run for run in FORMS if run.form.name in NAMES):
        found = {}
        for rate in RATES:
            found[rate] = losses_of(run, rate, steps, seeds, start)
            print(run.form.name, rate, found[rate], file=sys.stderr)
        for i, rows in enumerate(tables.values()):
            cells = {f"{rate:g}": f"{losses[i]:.3f}" for rate, losses in found.items()}
            rows.append({"form": run.form.name} | cells)
        best = min(found, key=lambda rate, found=found: found[rate][0])
        tables[f"loss of {TEXTS[0]}"][-1]["best"] = f"{best:g}"
    return tables


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    record.add_option(parser)
    args = parser.parse_args()
    tables = measure(args.steps, tuple(args.seeds))
    print(record.heading(jax.devices()))
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")
    record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
