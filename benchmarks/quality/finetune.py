"""Fine-tuning at a learning rate that falls to 1e-6, in all forms, paired with float32.

    python benchmarks finetune                 # the forms, five seeds
    python benchmarks finetune --constant 1e-6 # at a small rate from the first step on
    python benchmarks finetune --ablations     # each protection taken away
    python benchmarks finetune --only "plain bf16" --json FILE

The demo's transformer is trained in float32 on its novel, once, and kept in the folder
for temporary files. Each form then goes on with these weights on Python code, the
source of the optax that is installed. A seed sets the batches, the same for all forms,
so a run is compared with another one of the same seed: by the mean training loss of the
last steps before each of ten gates, and by the loss of held-out windows of both texts.
Runs of this program that FILE holds are not repeated.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from optax.contrib import muon
from scipy import stats
from the_demo import (
    HELD_OUT_WINDOWS,
    Form,
    LossFunction,
    Settings,
    compact,
    init_params,
    is_matrix,
    make_loss,
    make_schedule,
    make_steps,
    read_corpus,
    scaled,
    unscaled_value_and_grad,
)

import optax_mp

CONTEXT = 32
PRETRAINING = Settings(steps=4000, context=CONTEXT, batch_size=16)
FINE_TUNING = Settings(
    steps=2000,
    seeds=(0, 1, 2, 3, 4),
    context=CONTEXT,
    batch_size=4,
    peak_learning_rate=3e-4,
    final_learning_rate=1e-6,
)
GATES, POINTS, TRAILING = 10, 8, 4  # Points of the curve for each gate; averaged ones.
RESULT = Path(__file__).parent / "results" / "finetune.json"
HELD_OUT = "held-out losses at the end"
AT_GATES = "trailing training loss above float32's, at each gate"
ABLATIONS = "each protection taken away"

Wrapper = Callable[[optax.GradientTransformation], optax.GradientTransformation]


@dataclass(frozen=True)
class Run:
    """A form, and what it is compared with.

    Attributes:
        form: dtype, optimizer's wrapper, and gradients.
        against: the form that keeps the protection that this one lacks.
        inner: makes the optimizer that the form wraps.
    """

    form: Form
    against: str = "float32"
    inner: Callable[[Settings], optax.GradientTransformation] | None = None


def clipped_adamw(
    settings: Settings, b2: float = 0.999
) -> optax.GradientTransformation:
    """Return AdamW behind a clip of the gradients' norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), adamw(settings, b2))


def adamw(settings: Settings, b2: float = 0.999) -> optax.GradientTransformation:
    """Return AdamW, which decays matrices."""
    decay = {"weight_decay": settings.weight_decay, "mask": is_matrix}
    return optax.adamw(make_schedule(settings), b2=b2, **decay)


def clipped_muon(settings: Settings) -> optax.GradientTransformation:
    """Return Muon, with updates as large as AdamW's, so that the same rates serve."""
    inner = muon(make_schedule(settings), consistent_rms=0.2)
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def masters(storage: Any, **low_bit: Any) -> Wrapper:
    """Return `mixed_precision`, around `low_bit_state` if that has settings."""

    def wrap(inner: optax.GradientTransformation) -> optax.GradientTransformation:
        if low_bit:
            # All matrices, as in the demo's compact form.
            inner = optax_mp.low_bit_state(inner, min_size=128, **low_bit)
        return optax_mp.mixed_precision(inner, storage=storage)

    return wrap


def loss_scale(**settings: Any) -> Wrapper:
    """Return a loss scale with these settings around masters."""
    return lambda inner: optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(inner), **settings
    )


def with_amp(dtype: Any) -> Callable[[LossFunction], Any]:
    """Return what makes the gradients of the loss under `amp`."""
    return lambda loss: unscaled_value_and_grad(optax_mp.amp(loss, compute_dtype=dtype))


def clipped_before(loss: LossFunction) -> Any:
    """Return the gradients of the scaled loss, clipped as they are: a mistake."""
    gradients = optax_mp.value_and_grad(loss)
    clip = optax.clip_by_global_norm(1.0)

    def value_and_grad(*arguments: Any) -> tuple[jax.Array, Any]:
        value, grads = gradients(*arguments)
        return value, clip.update(grads, clip.init(grads))[0]

    return value_and_grad


def moments_to_nearest(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return `inner` on masters, with its state in bfloat16, rounded to nearest."""

    def init(params: optax.Params) -> Any:
        return optax_mp.cast_floating(inner.init(params), jnp.bfloat16)

    def update(grads: Any, state: Any, params: Any) -> Any:
        state = optax_mp.cast_floating(state, jnp.float32)
        updates, state = inner.update(grads, state, params)
        return updates, optax_mp.cast_floating(state, jnp.bfloat16)

    return optax_mp.mixed_precision(optax.GradientTransformation(init, update))


SPLIT8, SPLIT16, FULL = optax_mp.Split(8), optax_mp.Split(16), optax_mp.FullCopy()


def bf16(name: str, wrap: Wrapper, **settings: Any) -> Run:
    """Return a form with params in bfloat16."""
    return Run(Form(name, "bfloat16", wrap), **settings)


def f16(name: str, wrap: Wrapper, gradients: Any, **settings: Any) -> Run:
    """Return a form with params in float16."""
    return Run(Form(name, "float16", wrap, gradients), **settings)


FORMS = (
    Run(Form("float32", "float32")),
    bf16("plain bf16", lambda inner: inner),
    bf16("masters, FullCopy", masters(FULL)),
    bf16("masters, Split(16)", masters(SPLIT16)),
    bf16("masters, Split(8)", masters(SPLIT8)),
    bf16("compact", compact),
    bf16("stochastic rounding", optax_mp.stochastic_rounding),
    f16("f16, loss scale", scaled, optax_mp.value_and_grad),
    Run(Form("amp bf16", "float32", value_and_grad=with_amp(jnp.bfloat16))),
)
MUON = "Muon, momentum in float32"
UNPROTECTED = (
    bf16("compact, nearest codes", masters(SPLIT8, seed=None), against="compact"),
    bf16(
        "masters, bf16 moments, nearest",
        moments_to_nearest,
        against="masters, FullCopy",
    ),
    f16(
        "f16, no loss scale",
        masters(FULL),
        unscaled_value_and_grad,
        against="f16, loss scale",
    ),
    f16(
        "f16, clipped before unscaling",
        scaled,
        clipped_before,
        against="f16, loss scale",
        inner=adamw,
    ),
    f16(
        "f16, hysteresis of 2",
        loss_scale(growth_interval=100, hysteresis=2),
        optax_mp.value_and_grad,
        against="f16, loss scale",
    ),
    bf16(MUON, masters(SPLIT8), against=MUON, inner=clipped_muon),
    bf16("Muon, compact", compact, against=MUON, inner=clipped_muon),
)


def read_code(context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ASCII codes of optax's source, and windows of every tenth file."""
    files = sorted(Path(optax.__file__).parent.rglob("*.py"))
    files = [path for path in files if not path.name.endswith("_test.py")]

    def codes_of(paths: list[Path]) -> np.ndarray:
        codes = np.frombuffer(b"".join(p.read_bytes() for p in paths), np.uint8)
        return codes[codes < 128]

    held_out = codes_of(files[::10])
    starts = np.linspace(0, held_out.size - context - 1, HELD_OUT_WINDOWS).astype(int)
    text = codes_of([path for i, path in enumerate(files) if i % 10])
    return text, held_out[starts[:, None] + np.arange(context + 1)]


def pretrained(settings: Settings) -> optax.Params:
    """Return params that were trained on the novel, in values that bfloat16 has.

    They are as a model is published, and a start that all forms share to the bit.
    """
    template = init_params(jax.random.key(0), settings)
    name = f"{settings} jax {jax.__version__}".encode()
    folder = Path(tempfile.gettempdir())
    path = folder / f"optax_mp_{hashlib.sha256(name).hexdigest()[:12]}.npz"
    leaves, treedef = jax.tree.flatten(template)
    if not path.exists():
        text = jnp.asarray(read_corpus(settings.context)[0])
        tx = clipped_adamw(settings)
        loss = make_loss(settings, "float32")
        train = jax.jit(make_steps(unscaled_value_and_grad(loss), tx, settings))
        key = jax.random.key(1)
        run = train(template, tx.init(template), text, key, 0, settings.steps)
        np.savez(path, *jax.device_get(jax.tree.leaves(run[0])))
        print(f"pretrained; the last loss {run[2]:.3f} is a mean", file=sys.stderr)
    with np.load(path) as saved:
        leaves = [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))]
    # In two programs: within one, XLA may drop the rounding.
    low = optax_mp.cast_floating(treedef.unflatten(leaves), jnp.bfloat16)
    return optax_mp.cast_floating(low, jnp.float32)


def fine_tune(run: Run, settings: Settings, start: optax.Params, row: Any) -> Any:
    """Train from the seeds that the row lacks; return the row with all of them."""
    form = run.form
    tx = form.wrap((run.inner or clipped_adamw)(settings))
    loss = make_loss(settings, form.dtype)
    train = jax.jit(make_steps(form.value_and_grad(loss), tx, settings))
    evaluate = jax.jit(loss)
    code, held_out = map(jnp.asarray, read_code(settings.context))
    _, novel = map(jnp.asarray, read_corpus(settings.context))
    params = optax_mp.cast_floating(start, form.dtype)
    state = jax.jit(tx.init)(params)
    size = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    row = row or {"form": form.name, "seeds": [], "skipped": None}
    row |= {"bytes per weight": size / sum(x.size for x in jax.tree.leaves(params))}
    row = {"losses": [], "curve": []} | row
    for seed in settings.seeds:
        if seed in row["seeds"]:
            continue
        now, curve, stride = (params, state), [], settings.steps // (GATES * POINTS)
        for first in range(0, settings.steps, stride):
            *now, mean = train(*now, code, jax.random.key(seed), first, first + stride)
            curve.append(float(mean))
        ends = [float(evaluate(now[0], windows)) for windows in (held_out, novel)]
        row["seeds"].append(seed)
        row["losses"].append(ends)
        row["curve"].append(curve)
        if hasattr(now[1], "total_skipped_count"):
            row["skipped"] = (row["skipped"] or 0) + int(now[1].total_skipped_count)
    return row


def at_gates(row: record.Row) -> np.ndarray:
    """Return the trailing means of training losses: a row a seed, a column a gate."""
    curve = np.asarray(row["curve"]).reshape(-1, GATES, POINTS)
    return curve[:, :, -TRAILING:].mean(-1)


def gaps(row: record.Row, other: record.Row, of: Callable[..., Any]) -> np.ndarray:
    """Return what one form is above another, a row for each seed that both have."""
    shared = [seed for seed in row["seeds"] if seed in other["seeds"]]
    mine, its = (of(r)[[r["seeds"].index(s) for s in shared]] for r in (row, other))
    return mine - its


def held_out_losses(row: record.Row) -> np.ndarray:
    """Return the losses of both texts: a row for each seed."""
    return np.asarray(row["losses"], float)


def interval(values: np.ndarray, digits: int = 4) -> str:
    """Return the mean with the half width of its 95% interval, by Student's t."""
    mean, count = values.mean(), len(values)
    if not np.isfinite(mean):
        return record.NOT_FINITE
    if count < 2:
        return f"{mean:+.{digits}f}"
    return f"{mean:+.{digits}f} ± {half_width(values):.{digits}f}"


def half_width(values: np.ndarray) -> float:
    """Return the half width of the mean's 95% interval, by Student's t."""
    count = len(values)
    return stats.t.ppf(0.975, count - 1) * values.std(ddof=1) / count**0.5


def signs(values: np.ndarray) -> str:
    """Return how many of these are above zero."""
    return f"{(values > 0).sum()} of {values.size}"


def compared(row: record.Row, other: record.Row) -> record.Row:
    """Return what the table says of a form beside another."""
    if row is other:
        columns = ("code, above", "seeds above", "novel, above", "gates above")
        return dict.fromkeys(columns, "")
    code, novel = gaps(row, other, held_out_losses).T
    return {
        "code, above": interval(code),
        "seeds above": signs(code),
        "novel, above": interval(novel),
        "gates above": signs(gaps(row, other, at_gates)),
    }


def tables_of(rows: dict[str, record.Row]) -> record.Tables:
    """Return the tables of the forms: at the end, and on the way."""
    float32 = rows["float32"]
    ends, ways = [], []
    for row in (rows[r.form.name] for r in FORMS if r.form.name in rows):
        code, novel = held_out_losses(row).mean(0).tolist()
        line = {"form": row["form"], "seeds": row["seeds"]}
        line |= {"bytes per weight": row["bytes per weight"]}
        line |= {"code": f"{code:.4f}", "novel": f"{novel:.4f}"}
        line |= compared(row, float32) | {"skipped": row["skipped"]}
        ends.append(line | {name: row[name] for name in ("losses", "curve")})
        if row is not float32:
            steps = FINE_TUNING.steps // GATES
            found = gaps(row, float32, at_gates).T
            line = {f"{steps * (i + 1)}": interval(x) for i, x in enumerate(found)}
            ways.append({"form": row["form"]} | line)
    return {HELD_OUT: ends, AT_GATES: ways} if ways else {HELD_OUT: ends}


def ablations_of(
    rows: dict[str, record.Row], forms: dict[str, record.Row]
) -> record.Tables:
    """Return the table of what each protection is worth."""
    both, lines = forms | rows, []
    for run in UNPROTECTED:
        if (name := run.form.name) not in rows:
            continue
        row = rows[name]
        line = {"without": name, "with": run.against if run.against != name else ""}
        line |= {name: row[name] for name in ("seeds", "bytes per weight")}
        line |= compared(row, both.get(run.against, row)) | {"skipped": row["skipped"]}
        lines.append(line | {name: row[name] for name in ("losses", "curve")})
    return {ABLATIONS: lines}


def by_form(rows: Iterable[record.Row]) -> dict[str, record.Row]:
    """Return rows by their forms."""
    return {next(iter(row.values())): row for row in rows}


def main() -> None:
    """Read the options, train what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=FINE_TUNING.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=FINE_TUNING.seeds)
    parser.add_argument("--ablations", action="store_true", help="instead of the forms")
    parser.add_argument(
        "--constant", type=float, metavar="RATE", help="the rate after its warm-up"
    )
    parser.add_argument("--only", nargs="+", help="forms by their names")
    record.add_option(parser)
    args = parser.parse_args()
    settings = replace(FINE_TUNING, steps=args.steps, seeds=tuple(args.seeds))
    if args.constant is not None:
        rates = ("peak_learning_rate", "final_learning_rate")
        settings = replace(settings, **dict.fromkeys(rates, args.constant))
    start = pretrained(replace(PRETRAINING, steps=2 * args.steps))
    title = ABLATIONS if args.ablations else HELD_OUT
    kept = fingerprints.fresh_tables(args.json)
    rows, tables = by_form(kept.get(title, [])), {}
    forms = by_form(record.read(RESULT).tables[HELD_OUT]) if args.ablations else {}
    runs = [
        run
        for run in (UNPROTECTED if args.ablations else FORMS)
        if not args.only or run.form.name in args.only
    ]
    for run in runs:
        name, began = run.form.name, time.perf_counter()
        if name not in rows or not {*settings.seeds} <= {*rows[name]["seeds"]}:
            rows[name] = fine_tune(run, settings, start, rows.get(name))
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        tables = ablations_of(rows, forms) if args.ablations else tables_of(rows)
        record.finish(args.json, tables, record.machine_of(jax.devices()))
    print(record.heading(jax.devices()))
    for title, lines in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(lines)}")


if __name__ == "__main__":
    main()
