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

A form that is done is written at once, so that an interrupted run keeps what it has.
"""

import argparse
import statistics
import sys
from dataclasses import replace

import jax
import optax
import record
from optax.contrib import muon

import optax_mp
from optax_mp._demo.model import LossFunction
from optax_mp._demo.runs import (
    FLOAT32,
    GradFunction,
    Run,
    compact,
    naive_run,
    run_with_storage,
    unscaled_value_and_grad,
)
from optax_mp._demo.settings import Settings
from optax_mp._demo.text import make_corpus, read_text
from optax_mp._demo.train import (
    Moment,
    Result,
    is_matrix,
    make_schedule,
    train,
)

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


def with_amp(loss: LossFunction) -> GradFunction:
    """Return value and gradient of the loss that `amp` runs in bfloat16."""
    return unscaled_value_and_grad(optax_mp.amp(loss))


def forms_of(settings: Settings) -> tuple[Run, ...]:
    """Return all forms; the first of each optimizer is what the others compare with."""
    forms = (
        FLOAT32,
        naive_run("bf16"),
        run_with_storage("bf16", "full"),
        run_with_storage("bf16", "split16"),
        run_with_storage("bf16", "compact"),
        run_with_storage("bf16", "stochastic"),
        run_with_storage("f16", "full"),
        replace(FLOAT32, name="amp, float32 params", value_and_grad=with_amp),
    )
    masters = run_with_storage("bf16", "full")
    muon_forms = (
        replace(FLOAT32, name="Muon, float32"),
        replace(masters, name="Muon, bf16 + masters"),
        replace(masters, name="Muon, bf16 compact", transform=compact),
        replace(masters, name="Muon, all state in 8 bits", transform=in_8_bits),
    )
    with_adamw = [with_optimizer(form, adamw(settings)) for form in forms]
    with_muon = [with_optimizer(form, muon_as_adamw(settings)) for form in muon_forms]
    return (*with_adamw, *with_muon)


def in_8_bits(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer as `compact`, with 8 bits for what its products read, too."""
    low = optax_mp.low_bit_state(inner, min_size=128, product_bits=8)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def with_optimizer(form: Run, inner: optax.GradientTransformation) -> Run:
    """Return a form around this optimizer, in place of the demo's."""
    wrap = form.transform
    return replace(form, transform=lambda demo_adamw: wrap(inner))


def row_of(result: Result, reference: Result) -> record.Row:
    """Return a form as a row, beside the float32 run of the same optimizer."""
    losses = result.held_out_losses
    gaps = [a - b for a, b in zip(losses, reference.held_out_losses, strict=True)]
    first = result is reference
    return {
        "form": result.name,
        "bytes per weight": result.bytes_per_weight,
        "loss": statistics.fmean(losses),
        "above float32": None if first else statistics.fmean(gaps),
        "of each seed": None if first else ", ".join(f"{gap:+.3f}" for gap in gaps),
        "worse from step": None if first else ", ".join(worse_from(result, reference)),
        "skipped": result.skipped_steps,
        "losses": list(losses),
        "curve": [list(each.losses) for each in result.curves],
    }


def worse_from(result: Result, reference: Result) -> list[str]:
    """Return for each seed from which step on the training loss stays worse.

    "-" where it does not.
    """
    found = []
    for curve, other in zip(result.curves, reference.curves, strict=True):
        gaps = [a - b for a, b in zip(curve.losses, other.losses, strict=False)]
        means = [
            statistics.fmean(gaps[i : i + MEAN_OVER])
            for i in range(len(gaps) - MEAN_OVER + 1)
        ]
        below = [i for i, mean in enumerate(means) if not mean > WORSE_BY]
        start = below[-1] + 1 if below else 0
        found.append(str(curve.steps[start]) if start < len(means) else "-")
    return found


def main() -> None:
    """Read the options, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=NANOGPT.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=NANOGPT.seeds)
    names = [form.name for form in forms_of(NANOGPT)]
    parser.add_argument("--forms", nargs="+", choices=names, default=names)
    record.add_option(parser)
    args = parser.parse_args()
    settings = replace(NANOGPT, steps=args.steps, seeds=tuple(args.seeds))
    forms = [form for form in forms_of(settings) if form.name in args.forms]
    corpus = make_corpus(read_text(None), settings.context)
    seeds = ", ".join(map(str, settings.seeds))
    title = f"after {settings.steps} steps, seeds: {seeds}"
    tables = {title: []}
    reference = None
    for form in forms:
        result = train(form, settings, corpus, follow)
        is_reference = form.name in ("float32", "Muon, float32")
        reference = result if is_reference or reference is None else reference
        tables[title].append(row_of(result, reference))
        record.finish(args.json, tables, record.machine_of(jax.devices()))
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(tables[title])}")


def follow(name: str, moment: Moment) -> None:
    """Say where a run stands, every 500 steps."""
    if moment.loss is not None and moment.step % 500 == 0:
        print(f"{name}: step {moment.step}, loss {moment.loss:.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
