"""The demo's decoder on longer runs, which are stopped and resumed.

    python benchmarks language --json FILE     # goes on where it was interrupted
    python benchmarks language --minutes 60    # a piece of it
    python benchmarks language --minutes 0     # the tables of what is trained
    python benchmarks language --task nanogpt --seeds 0 1 2 --json FILE
    python benchmarks language --task zipf --forms float32 compact

The tasks:

- library: ten million weights on the standard library of the Python that runs this.
- nanogpt: the run that nanoGPT's README has for a CPU, with its sizes and its AdamW, on
  the demo's novel.
- muon: the same by Muon, with updates as large as AdamW's.
- zipf: a smaller model over 50,000 tokens, which are made, as frequent as Zipf's law
  says. Embedding and head are nearly all of its weights, and few of their rows are seen
  often.

Clipping, warm-up, cosine; a seed sets the first weights and the batches, the same for
all forms. A piece ends after its minutes, or when it is killed. The next one goes on
from the last checkpoint, by Orbax.

`MARGIN` was written here before the first run: a form is equal to float32 if their
held-out losses differ by no more. An interval that contains the margin is undecided.
"""

import argparse
import hashlib
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import record
from finetune import (
    GATES,
    POINTS,
    SPLIT8,
    at_gates,
    clipped_adamw,
    clipped_muon,
    half_width,
    interval,
    signs,
)
from the_demo import (
    Form,
    Settings,
    init_params,
    make_loss,
    make_steps,
    read_corpus,
)

import optax_mp

MARGIN = 0.002  # nats per character
SETTINGS = Settings(
    steps=480,
    width=256,
    layer_count=13,
    head_count=4,
    context=256,
    peak_learning_rate=1e-3,
    final_learning_rate=1e-5,
)
# https://github.com/karpathy/nanoGPT/blob/master/README.md, "I only have a macbook"; a
# decay of 0.99 of the second moment is of its config/train_shakespeare_char.py.
NANOGPT = Settings(
    steps=2000,
    width=128,
    layer_count=4,
    head_count=4,
    context=64,
    batch_size=12,
    peak_learning_rate=1e-3,
    final_learning_rate=1e-4,
)
ZIPF = Settings(
    steps=480,
    width=128,  # the least with which a head has lines of its own
    layer_count=2,
    head_count=4,
    context=64,
    batch_size=8,
    peak_learning_rate=3e-3,
    final_learning_rate=3e-5,
)
VOCABULARY = 50_000
FOLDER = Path(__file__).parents[2] / "build" / "language"


def folder_of(form: str, task: str, seed: int) -> Path:
    """Return where the checkpoints of a run are: of this program of the form."""
    found = fingerprints.of_result("CPU cores", "", {"": [{"form": form}]})
    marks = [form.replace(" ", "_"), str(seed), *found.values()]
    return (FOLDER / task / "-".join(marks)).absolute()


def compact(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the compact form, with its default settings."""
    return optax_mp.mixed_precision(optax_mp.low_bit_state(inner), storage=SPLIT8)


FORMS = [
    Form("float32", "float32"),
    Form("plain bf16", "bfloat16"),
    Form("masters", "bfloat16", optax_mp.mixed_precision),
    Form("compact", "bfloat16", compact),
]
FORMS = {form.name: form for form in FORMS}


def read_library(context: int, windows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return the ASCII codes of most files, and windows of those that are held out.

    These are one file in twenty, chosen by the hash of its name.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.rglob("*.py"))
    files = [path for path in files if "site-packages" not in path.parts]

    def is_held_out(path: Path) -> bool:
        name = path.relative_to(folder).as_posix().encode()
        return hashlib.sha256(name).digest()[0] * 20 < 256

    def codes_of(chosen: list[Path]) -> np.ndarray:
        codes = np.frombuffer(b"".join(p.read_bytes() for p in chosen), np.uint8)
        return codes[codes < 128]

    held_out = codes_of([path for path in files if is_held_out(path)])
    starts = np.linspace(0, held_out.size - context - 1, windows).astype(int)
    text = codes_of([path for path in files if not is_held_out(path)])
    return text, held_out[starts[:, None] + np.arange(context + 1)]


def make_text(context: int, windows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens by Zipf's law, and windows of them that are held out.

    With a chance of one half, a token is the successor of the one before, which is
    about as frequent: so there is something to learn of each token, rare or not.
    """
    random = np.random.default_rng(0)
    shares = 1 / np.arange(1.0, VOCABULARY + 1)
    text = random.choice(VOCABULARY, size=1_000_000, p=shares / shares.sum())
    ranks = np.arange(VOCABULARY).reshape(-1, 10)
    after = random.permuted(ranks, axis=1).ravel()
    follows = random.random(text.size) < 0.5
    for i in np.flatnonzero(follows[1:]) + 1:
        text[i] = after[text[i - 1]]
    text, held_out = np.split(text.astype(np.int32), [text.size - text.size // 10])
    starts = np.linspace(0, held_out.size - context - 1, windows).astype(int)
    return text, held_out[starts[:, None] + np.arange(context + 1)]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        settings: the sizes and the rates.
        read: returns the text and windows that are held out, for a length of context.
        inner: makes the optimizer that the forms wrap.
        forms: the names of the forms.
        init: makes the first params.
    """

    settings: Settings
    read: Callable[[int], tuple[np.ndarray, np.ndarray]]
    inner: Callable[[Settings], optax.GradientTransformation]
    forms: tuple[str, ...]
    init: Callable[[jax.Array, Settings], Any] = init_params


def init_wide(key: jax.Array, settings: Settings) -> Any:
    """Return first params, with an embedding and a head over the made tokens."""
    width, keys = settings.width, jax.random.split(jax.random.fold_in(key, 1))
    return init_params(key, settings) | {
        "characters": jax.random.normal(keys[0], (VOCABULARY, width)),
        "logits": jax.random.normal(keys[1], (width, VOCABULARY)) * width**-0.5,
    }


IN_SHORT = ("float32", "masters", "compact", "plain bf16")  # In this order.
TASKS = {
    "library": Task(SETTINGS, read_library, clipped_adamw, IN_SHORT),
    "nanogpt": Task(NANOGPT, read_corpus, partial(clipped_adamw, b2=0.99), IN_SHORT),
    "muon": Task(NANOGPT, read_corpus, clipped_muon, IN_SHORT),
    "zipf": Task(ZIPF, make_text, clipped_adamw, IN_SHORT, init_wide),
}


class Run:
    """The training of one form from one seed, in pieces.

    Attributes:
        row: what is known of it: steps made, curve, held-out losses by window.
        before: how many seconds earlier pieces took.
    """

    def __init__(self, form: Form, task: Task, folder: Path, seed: int) -> None:
        """Take up the last checkpoint, if there is one."""
        self.settings = settings = task.settings
        tx = form.wrap(task.inner(settings))
        loss = make_loss(settings, form.dtype)
        steps = make_steps(form.value_and_grad(loss), tx, settings)
        self._train = jax.jit(steps, donate_argnums=(0, 1))
        self._losses = jax.jit(
            lambda params, windows: jax.lax.map(
                lambda w: loss(params, w[None]), windows
            )
        )
        self._checkpoints = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=1),
        )
        # Cast between two programs: within one, XLA may drop the rounding.
        self._seed = 2 * seed
        params = task.init(jax.random.key(self._seed), settings)
        params = optax_mp.cast_floating(params, form.dtype)
        self.trained = params, jax.jit(tx.init)(params)
        size = sum(x.nbytes for x in jax.tree.leaves(self.trained))
        weights = sum(x.size for x in jax.tree.leaves(params))
        self.row = {
            "form": form.name,
            "seed": seed,
            "weights": weights,
            "steps": 0,
            "seconds": 0.0,
        }
        self.row |= {"bytes per weight": size / weights, "curve": [], "held out": []}
        if (last := self._checkpoints.latest_step()) is not None:
            args = ocp.args.Composite(
                trained=ocp.args.StandardRestore(self.trained),
                row=ocp.args.JsonRestore(),
            )
            found = self._checkpoints.restore(last, args=args)
            self.trained, self.row = found["trained"], found["row"]
        self.before = self.row["seconds"]

    def advance(self, text: jax.Array, held_out: jax.Array, until: float) -> None:
        """Train to the end, or until this time, with a checkpoint at each gate."""
        stride = self.settings.steps // (GATES * POINTS)
        key = jax.random.key(self._seed + 1)
        began = time.monotonic()
        while self.row["steps"] < self.settings.steps and time.time() < until:
            for _ in range(POINTS):
                first = self.row["steps"]
                self.row["steps"] = first + stride
                *trained, mean = self._train(
                    *self.trained, text, key, first, first + stride
                )
                self.trained = tuple(trained)
                self.row["curve"].append(float(mean))
            found = self._losses(self.trained[0], held_out)
            self.row["held out"].append(found.tolist())
            self.row["seconds"] = self.before + time.monotonic() - began
            args = ocp.args.Composite(
                trained=ocp.args.StandardSave(self.trained),
                row=ocp.args.JsonSave(self.row),
            )
            self._checkpoints.save(self.row["steps"], args=args)
            # The next call donates these arrays.
            self._checkpoints.wait_until_finished()
        self._checkpoints.close()


def tables_of(rows: list[record.Row]) -> record.Tables:
    """Return the table of all finished runs."""
    forms: dict[str, list[record.Row]] = {}
    for row in rows:
        if len(row["held out"]) == GATES:
            forms.setdefault(row["form"], []).append(row)
    ends = []
    for form, runs in forms.items():
        line = {x: runs[0][x] for x in ("form", "weights", "steps", "bytes per weight")}
        line["seeds"] = [run["seed"] for run in runs]
        curves, losses = curves_and_losses(runs)
        line["held-out loss"] = float(losses[:, -1].mean())
        if form != "float32":
            same = [r for r in forms["float32"] if r["seed"] in line["seeds"]]
            others = curves_and_losses(same)
            line |= above(losses - others[1], curves - others[0])
        ends.append(line | {"curve": curves.tolist()})
    return {"held-out loss at the end": ends}


def curves_and_losses(runs: list[record.Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return training losses, and held-out ones at the gates: a row for each run."""
    curves, losses = ([run[x] for run in runs] for x in ("curve", "held out"))
    return np.asarray(curves), np.asarray(losses).mean(-1)


def above(gaps: np.ndarray, curve_gaps: np.ndarray) -> record.Row:
    """Return the columns that compare a form with float32, one row per run."""
    ends = gaps[:, -1]
    size, half = abs(ends.mean()), half_width(ends)
    points = curve_gaps.shape[1] // 5
    slopes = np.polyfit(np.arange(points), curve_gaps[:, -points:].T, 1)[0]
    is_equal = "yes" if size + half <= MARGIN else "not decided"
    return {
        "above float32's": interval(ends),
        f"within {MARGIN}": "**no**" if size - half > MARGIN else is_equal,
        "by seed": [f"{x:+.4f}" for x in ends],
        "gates above": signs(at_gates({"curve": curve_gaps})),
        "rise in the last fifth": interval(slopes * points),
    }


def main() -> None:
    """Read the options, train for a while, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="library")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="others than its own")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of this piece"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    record.add_option(parser)
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes
    task = TASKS[args.task]
    text, held_out = map(jnp.asarray, task.read(task.settings.context))
    rows = []
    before = 0.0
    for seed in args.seeds:
        for form in args.forms or task.forms:
            run = Run(FORMS[form], task, folder_of(form, args.task, seed), seed)
            run.advance(text, held_out, until)
            rows.append(run.row)
            before += run.before
    tables = tables_of(rows)
    machine = f"{record.machine_of(jax.devices())}, Python {sys.version.split()[0]}"
    packages = ("jax", "optax", "orbax-checkpoint")
    record.finish(args.json, tables, machine, packages, before=before)
    for title, lines in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(lines)}")


if __name__ == "__main__":
    main()
