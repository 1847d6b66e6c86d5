"""Held-out losses of a character model that trains long enough to tell forms apart.

    python benchmarks/characters.py                       # all forms, three seeds
    python benchmarks/characters.py --seeds 0 --forms float32 "bf16 naive"
    python benchmarks/characters.py --json FILE  # the table as data, with curves

The sizes and rates are nanoGPT's for characters on a CPU: 4 layers, 4 heads, width 128,
context 64, batch 12, 2000 steps, AdamW from 1e-3 to 1e-4 after 100 steps of warmup,
beta2 0.99, weight decay 0.1 on matrices, gradients clipped to norm 1. The model is the
demo's transformer, the text the demo's novel. "worse from step" is the first step from
which the training loss, on the same batches as float32's and averaged over 100 steps,
is more than 0.005 above float32's for the rest of the run, for each seed.

A form that is done is written at once, and what FILE holds already is not trained
again. So an interrupted run goes on where it was, and a later one adds seeds and forms.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
import record
from optax.contrib import muon
from the_demo import (
    FORMS,
    Form,
    LossFunction,
    Result,
    Settings,
    calls,
    compact,
    is_matrix,
    make_schedule,
    read_corpus,
    train,
    unscaled_value_and_grad,
)

import optax_mp

NANOGPT = Settings(
    steps=2000,
    seeds=(0, 1, 2),
    width=128,
    layer_count=4,
    head_count=4,
    context=64,
    batch_size=12,
    peak_learning_rate=1e-3,
    final_learning_rate=1e-4,
    weight_decay=0.1,
)
MEAN_OVER = 4  # Points of a curve, of 25 steps each.
WORSE_BY = 0.005


def adamw(settings: Settings) -> optax.GradientTransformation:
    """Return nanoGPT's AdamW."""
    schedule, decay = make_schedule(settings), settings.weight_decay
    inner = optax.adamw(schedule, b2=0.99, weight_decay=decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def muon_as_adamw(settings: Settings) -> optax.GradientTransformation:
    """Return Muon, with updates as large as AdamW's, so that the same rates serve."""
    decay = {"weight_decay": settings.weight_decay, "adam_b2": 0.99}
    inner = muon(make_schedule(settings), consistent_rms=0.2, **decay)
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def with_amp(loss: LossFunction) -> Any:
    """Return value and gradient of the loss that `amp` runs in bfloat16."""
    return unscaled_value_and_grad(optax_mp.amp(loss))


def forms_of(settings: Settings) -> tuple[Form, ...]:
    """Return all forms; the first of each optimizer is what the others compare with."""
    float32, naive, masters, with_codes, _, scaled = FORMS
    forms = (
        float32,
        naive._replace(name="bf16 naive"),
        masters._replace(name="bf16 + masters"),
        masters._replace(name="bf16 split16", wrap=split_16),
        with_codes._replace(name="bf16 compact"),
        masters._replace(name="bf16 stochastic", wrap=optax_mp.stochastic_rounding),
        scaled._replace(name="f16 + masters"),
        float32._replace(name="amp, float32 params", value_and_grad=with_amp),
    )
    muon_forms = (
        float32._replace(name="Muon, float32"),
        masters._replace(name="Muon, bf16 + masters"),
        masters._replace(name="Muon, bf16 compact", wrap=compact),
        masters._replace(name="Muon, all state in 8 bits", wrap=in_8_bits),
    )
    with_adamw = [with_optimizer(form, adamw(settings)) for form in forms]
    with_muon = [with_optimizer(form, muon_as_adamw(settings)) for form in muon_forms]
    return (*with_adamw, *with_muon)


def split_16(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` on masters that are stored as the param and 16 more bits."""
    return optax_mp.mixed_precision(inner, storage=optax_mp.Split(16))


def in_8_bits(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer as `compact`, with 8 bits for what its products read, too."""
    low = optax_mp.low_bit_state(inner, min_size=128, product_bits=8)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def with_optimizer(form: Form, inner: optax.GradientTransformation) -> Form:
    """Return a form around this optimizer, in place of the demo's."""
    wrap = form.wrap
    return form._replace(wrap=lambda demo_adamw: wrap(inner))


def read_rows(path: Path | None, title: str) -> dict[str, record.Row]:
    """Return the rows that a file holds already, by form."""
    if path is None or not path.exists():
        return {}
    return {row["form"]: row for row in record.read(path).tables.get(title, [])}


def with_result(row: record.Row | None, result: Result, seeds: list[int]) -> record.Row:
    """Return the row of a form with the seeds of one more run."""
    trained = zip(result.losses, result.curves, strict=True)
    found = dict(zip(seeds, trained, strict=True))
    skipped = result.skipped
    if row is not None:
        before = zip(row["losses"], row["curve"], strict=True)
        found |= zip(row["seeds"], before, strict=True)
        skipped = None if skipped is None else skipped + row["skipped"]
    found = dict(sorted(found.items()))
    return {
        "form": result.form.name,
        "seeds": list(found),
        "bytes per weight": result.bytes_per_weight,
        "skipped": skipped,
        "losses": [loss for loss, _ in found.values()],
        "curve": [curve for _, curve in found.values()],
    }


def table_of(
    rows: dict[str, record.Row], names: list[str], steps: int
) -> list[record.Row]:
    """Return the rows that are there, in the order of the names."""
    return [compared(rows[name], rows, steps) for name in names if name in rows]


def compared(row: record.Row, rows: dict[str, record.Row], steps: int) -> record.Row:
    """Return a row beside float32's of the same optimizer, where it has the seeds."""
    name = "Muon, float32" if row["form"].startswith("Muon") else "float32"
    other = rows.get(name, {"seeds": []})
    gaps, worse = [], []
    for seed, loss, curve in zip(
        row["seeds"], row["losses"], row["curve"], strict=True
    ):
        if row is not other and seed in other["seeds"]:
            place = other["seeds"].index(seed)
            gaps.append(loss - other["losses"][place])
            worse.append(worse_from(curve, other["curve"][place], steps))
    return {
        "form": row["form"],
        "seeds": row["seeds"],
        "bytes per weight": row["bytes per weight"],
        "loss": statistics.fmean(row["losses"]),
        "above float32": statistics.fmean(gaps) if gaps else None,
        "of each seed": ", ".join(f"{gap:+.3f}" for gap in gaps) or None,
        "worse from step": ", ".join(worse) or None,
        "skipped": row["skipped"],
        "losses": row["losses"],
        "curve": row["curve"],
    }


def worse_from(curve: list[float], other: list[float], steps: int) -> str:
    """Return from which step on the training loss stays worse; "-" if it does not."""
    gaps = [a - b for a, b in zip(curve, other, strict=False)]
    means = [
        statistics.fmean(gaps[i : i + MEAN_OVER])
        for i in range(len(gaps) - MEAN_OVER + 1)
    ]
    below = [i for i, mean in enumerate(means) if not mean > WORSE_BY]
    start = below[-1] + 1 if below else 0
    counts = [stop for _, stop in calls(steps)]
    return str(counts[start]) if start < len(means) else "-"


def main() -> None:
    """Read the options, train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=NANOGPT.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=NANOGPT.seeds)
    names = [form.name for form in forms_of(NANOGPT)]
    parser.add_argument("--forms", nargs="+", choices=names, default=names)
    record.add_option(parser)
    args = parser.parse_args()
    title = f"after {args.steps} steps"
    rows = read_rows(args.json, title)
    settings = replace(NANOGPT, steps=args.steps)
    corpus = read_corpus(settings.context)
    for form in forms_of(settings):
        row = rows.get(form.name)
        seeds = [s for s in args.seeds if row is None or s not in row["seeds"]]
        if form.name not in args.forms or not seeds:
            continue
        chosen = replace(settings, seeds=tuple(seeds))
        print(f"{form.name}: {len(seeds)} seeds", file=sys.stderr)
        result = train(form, chosen, corpus)
        rows[form.name] = with_result(row, result, seeds)
        tables = {title: table_of(rows, names, args.steps)}
        record.finish(args.json, tables, record.machine_of(jax.devices()))
    table = record.as_markdown(table_of(rows, names, args.steps))
    print(f"{record.heading(jax.devices())}\n\n{table}")


if __name__ == "__main__":
    main()
