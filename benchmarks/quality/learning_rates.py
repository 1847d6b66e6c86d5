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
import sys
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
# What `convergence` calls the forms of `finetune`.
FORMS = {
    "float32": "float32",
    "plain bf16": "bf16, naive",
    "masters, FullCopy": "bf16, FullCopy",
}
TUNING_SEEDS, SEED_COUNT = (0, 1), 5
FROM_START = (convergence.digits, convergence.regression)

Losses = dict[float, float]


def fine_tuned(
    name: str, rate: float, steps: int, start: optax.Params
) -> tuple[float, ...]:
    """Return the mean losses of both texts after fine-tuning at a rate."""
    (run,) = (run for run in finetune.FORMS if run.form.name == name)
    rates = dict.fromkeys(("peak_learning_rate", "final_learning_rate"), rate)
    settings = replace(finetune.FINE_TUNING, steps=steps, seeds=TUNING_SEEDS, **rates)
    by_seed = finetune.fine_tune(run, settings, start, None)["losses"]
    return tuple(map(fmean, zip(*by_seed, strict=True)))


def loss_from_start(name: str, peak: float, task: convergence.Task) -> float:
    """Return the mean loss of a task of `convergence` with this peak rate."""
    (form,) = (form for form in convergence.FORMS if form.name == FORMS[name])
    rates = {"peak_learning_rate": peak, "final_learning_rate": peak / 100}
    settings = replace(convergence.DEFAULTS, **rates)
    losses, _ = convergence.final_losses(task, form, SEED_COUNT, settings)
    return float(losses.mean())


def row_of(name: str, losses: Losses) -> record.Row:
    """Return the row of a form: its loss at each rate."""
    return {"form": name} | {f"{rate:g}": f"{x:.4g}" for rate, x in losses.items()}


def with_best(name: str, losses: Losses) -> record.Row:
    """Return the row of a form, with the rate of its lowest loss."""
    best = min(losses, key=losses.__getitem__)
    print(name, losses, file=sys.stderr)
    return row_of(name, losses) | {"best": f"{best:g}"}


def measure(steps: int) -> record.Tables:
    """Return a table of losses for each task and text: a row for each form."""
    tables: record.Tables = {f"loss of {text}": [] for text in TEXTS}
    new, old = tables.values()
    start = finetune.pretrained(replace(finetune.PRETRAINING, steps=5 * steps))
    for name in FORMS:
        pairs = [fine_tuned(name, rate, steps, start) for rate in RATES]
        of_new, of_old = (
            dict(zip(RATES, losses, strict=True)) for losses in zip(*pairs, strict=True)
        )
        new.append(with_best(name, of_new))
        old.append(row_of(name, of_old))
    for task in (make() for make in FROM_START):
        tables[f"{task.title}, after {task.steps} steps"] = [
            with_best(name, {x: loss_from_start(name, x, task) for x in PEAKS})
            for name in FORMS
        ]
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
    packages = ("jax", "optax", "scikit-learn")
    record.finish(args.json, tables, record.machine_of(jax.devices()), packages)


if __name__ == "__main__":
    main()
