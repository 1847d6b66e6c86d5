"""The demo's decoder on longer runs, which are stopped and resumed.

    python benchmarks language --minutes 60     # a piece; again until all is trained
    python benchmarks language --json FILE      # the tables of what is trained
    python benchmarks language --task nanogpt --seeds 0 1 --minutes 60 --json FILE

The tasks: ten million weights on the standard library of the Python that runs this; and
the run that nanoGPT's README has for a CPU, with its sizes and its AdamW, on the demo's
novel. AdamW, clipping, warm-up, cosine; a seed sets the first weights and the batches,
the same for all forms. A piece ends after its minutes, or when it is killed. The next
one goes on from the last checkpoint, by Orbax.

`MARGIN` was written here before the first run: a form is equal to float32 if their
held-out losses differ by no more. An interval that contains the margin is undecided.
"""

import argparse
import hashlib
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import record
from finetune import (
    FULL,
    GATES,
    POINTS,
    SPLIT8,
    Wrapper,
    at_gates,
    clipped_adamw,
    half_width,
    interval,
    masters,
    signs,
)
from the_demo import (
    Form,
    Settings,
    init_params,
    make_loss,
    make_steps,
    read_corpus,
    scaled,
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
FOLDER = Path(__file__).parents[2] / "build" / "language"


def compact(**settings: Any) -> Wrapper:
    """Return the compact form; without settings it is the default."""
    return lambda inner: optax_mp.mixed_precision(
        optax_mp.low_bit_state(inner, **settings), storage=SPLIT8
    )


FORMS = [
    Form("float32", "float32"),
    Form("plain bf16", "bfloat16"),
    Form("masters", "bfloat16", optax_mp.mixed_precision),
    Form(
        "masters, bf16 moments to nearest",
        "bfloat16",
        masters(FULL, dtype=jnp.bfloat16, seed=None),
    ),
    Form("stochastic rounding", "bfloat16", optax_mp.stochastic_rounding),
    Form("f16, loss scale", "float16", scaled, optax_mp.value_and_grad),
    Form("compact, no column scales", "bfloat16", compact(column_scales=False)),
    Form("compact", "bfloat16", compact()),
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


class Run:
    """The training of one form from one seed, in pieces.

    Attributes:
        row: what is known of it: steps made, curve, held-out losses by window.
    """

    def __init__(
        self,
        form: Form,
        settings: Settings,
        folder: Path,
        seed: int = 0,
        inner: Callable[..., Any] = clipped_adamw,
    ) -> None:
        """Take up the last checkpoint, if there is one."""
        self.settings = settings
        tx = form.wrap(inner(settings))
        loss = make_loss(settings, form.dtype)
        steps = make_steps(form.value_and_grad(loss), tx, settings)
        self._train = jax.jit(steps, donate_argnums=(0, 1))
        self._losses = jax.jit(
            lambda params, windows: jax.lax.map(
                lambda w: loss(params, w[None]), windows
            )
        )
        self._checkpoints = ocp.CheckpointManager(
            (folder / f"{form.name} {seed}".replace(" ", "_")).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=1),
        )
        # Cast between two programs: within one, XLA may drop the rounding.
        self._seed = 2 * seed
        params = init_params(jax.random.key(self._seed), settings)
        params = optax_mp.cast_floating(params, form.dtype)
        self.trained = params, jax.jit(tx.init)(params)
        size = sum(x.nbytes for x in jax.tree.leaves(self.trained))
        weights = sum(x.size for x in jax.tree.leaves(params))
        self.row = {
            "form": form.name,
            "seed": seed,
            "weights": weights,
            "steps": 0,
        }
        self.row |= {"bytes per weight": size / weights, "curve": [], "held out": []}
        if (last := self._checkpoints.latest_step()) is not None:
            args = ocp.args.Composite(
                trained=ocp.args.StandardRestore(self.trained),
                row=ocp.args.JsonRestore(),
            )
            found = self._checkpoints.restore(last, args=args)
            self.trained, self.row = found["trained"], found["row"]

    def advance(self, text: jax.Array, held_out: jax.Array, until: float) -> None:
        """Train to the end, or until this time, with a checkpoint at each gate."""
        stride = self.settings.steps // (GATES * POINTS)
        key = jax.random.key(self._seed + 1)
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


LIBRARY_FORMS = ("float32", "masters", "compact", "plain bf16")  # In this order.
# The settings, the text with held-out windows, the optimizer, and the forms.
TASKS = {
    "library": (SETTINGS, read_library, clipped_adamw, LIBRARY_FORMS),
    "nanogpt": (NANOGPT, read_corpus, partial(clipped_adamw, b2=0.99), tuple(FORMS)),
}


def main() -> None:
    """Read the options, train for a while, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="library")
    parser.add_argument("--minutes", type=float, default=0.0, help="of this piece")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    record.add_option(parser)
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes
    settings, read, inner, forms = TASKS[args.task]
    text, held_out = map(jnp.asarray, read(settings.context))
    rows = []
    for seed in args.seeds:
        for form in forms:
            run = Run(FORMS[form], settings, FOLDER / args.task, seed, inner)
            run.advance(text, held_out, until)
            rows.append(run.row)
    tables = tables_of(rows)
    machine = f"{record.machine_of(jax.devices())}, Python {sys.version.split()[0]}"
    record.finish(args.json, tables, machine, ("jax", "optax", "orbax-checkpoint"))
    for title, lines in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(lines)}")


if __name__ == "__main__":
    main()
