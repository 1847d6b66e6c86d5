"""Which learning rate is best with masters, and which without.

    python benchmarks learning_rates
    python benchmarks learning_rates --json FILE

Three tasks. One is the fine-tuning of `finetune`, shorter and at a constant rate after
its warm-up: a small transformer goes on from a novel to Python code. The others are the
conv net and the regression of `convergence`, from their start, at a rate that falls to
a hundredth. A cell is the loss of held-out data at the end, the mean over seeds.
"Best" is the rate of the lowest. Plain bfloat16 loses the updates that are small
against their weight, and does best at a higher rate, or at the same.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import convergence
import finetune
import jax
import optax
import record

RATES = (1e-4, 3e-4, 1e-3, 2e-3, 3e-3)  # of fine-tuning
PEAKS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # from the start
TEXTS = ("the new text", "the old text")
NAMES = ("float32", "plain bf16", "masters, FullCopy")
# The same forms, as `convergence` calls them.
ALIASES = ("float32", "bf16, naive", "bf16, FullCopy")
TUNED, STARTED = (0, 1), 5  # seeds
FROM_START = (convergence.digits, convergence.regression)


def fine_tuned(
    name: str, rate: float, steps: int, start: optax.Params
) -> tuple[float, ...]:
    """Return the mean losses of both texts after fine-tuning at a rate."""
    (run,) = (run for run in finetune.FORMS if run.form.name == name)
    rates = dict.fromkeys(("peak_learning_rate", "final_learning_rate"), rate)
    settings = replace(finetune.FINE_TUNING, steps=steps, seeds=TUNED, **rates)
    by_seed = finetune.fine_tune(run, settings, start, None)["losses"]
    return tuple(map(fmean, zip(*by_seed, strict=True)))


def from_start(name: str, peak: float, task: convergence.Task) -> float:
    """Return the mean loss of a task of `convergence` with this peak rate."""
    alias = ALIASES[NAMES.index(name)]
    (form,) = (form for form in convergence.FORMS if form.name == alias)
    rates = {"peak_learning_rate": peak, "final_learning_rate": peak / 100}
    settings = replace(convergence.DEFAULTS, **rates)
    return float(convergence.final_losses(task, form, STARTED, settings)[0].mean())


def sweep(
    rates: tuple[float, ...], loss_at: Callable[[str, float], float]
) -> list[record.Row]:
    """Return a row for each form: its loss at each rate, and the best rate."""
    rows = []
    for name in NAMES:
        found = {rate: loss_at(name, rate) for rate in rates}
        print(name, found, file=sys.stderr)
        cells = {f"{rate:g}": f"{loss:.4g}" for rate, loss in found.items()}
        rows.append({"form": name} | cells | {"best": f"{min(found, key=found.get):g}"})
    return rows


def measure(steps: int) -> record.Tables:
    """Return a table of losses for each task and text."""
    start = finetune.pretrained(replace(finetune.PRETRAINING, steps=5 * steps))
    tune = functools.cache(lambda name, rate: fine_tuned(name, rate, steps, start))
    tables = {
        f"loss of {text}": sweep(RATES, lambda *at, i=i: tune(*at)[i])
        for i, text in enumerate(TEXTS)
    }
    for row in tables["loss of the old text"]:
        del row["best"]  # which is to train least
    for task in (make() for make in FROM_START):
        tables[task.title] = sweep(PEAKS, lambda *at, task=task: from_start(*at, task))
    return tables


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="of fine-tuning")
    record.add_option(parser)
    args = parser.parse_args()
    tables = measure(args.steps)
    print(record.heading(jax.devices()))
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")
    record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
