"""Ten million weights on the source of Python's standard library, stopped and resumed.

    python benchmarks language --minutes 60     # a piece; again until all is trained
    python benchmarks language --json FILE      # the tables of what is trained

The demo's decoder, with ten million weights, is trained on the standard library of the
Python that runs this: AdamW, clipping, warm-up, cosine; each form on the same batches
in the same order. A piece ends after its minutes, or when it is killed. The next one
goes on from the last checkpoint, by Orbax, bit for bit: tests/project/test_language.py.
One file in twenty, chosen by the hash of its name, is held out.

`MARGIN` was written here before the first run: a form is called equal to float32 if
their held-out losses differ by no more.
"""

import argparse
import hashlib
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import record
from finetune import FULL, SPLIT8, Wrapper, clipped_adamw, interval, masters, signs
from the_demo import (
    Form,
    Settings,
    init_params,
    make_loss,
    make_steps,
    unscaled_value_and_grad,
)

import optax_mp

MARGIN = 0.002  # nats per character
SETTINGS = Settings(
    steps=1200,
    width=256,
    layer_count=13,
    head_count=4,
    context=256,
    peak_learning_rate=1e-3,
    final_learning_rate=1e-5,
)
GATES, POINTS, TRAILING = 10, 8, 4  # Points of the curve for each gate; averaged ones.
FOLDER = Path(__file__).parents[2] / "build" / "language"
END, WAY = "held-out loss at the end", "above float32's, at each gate"


def compact(**settings: Any) -> Wrapper:
    """Return the compact form; without settings it is the default."""
    return lambda inner: optax_mp.mixed_precision(
        optax_mp.low_bit_state(inner, **settings), storage=SPLIT8
    )


FORMS = (
    Form("float32", "float32"),
    Form("plain bf16", "bfloat16"),
    Form("masters", "bfloat16", optax_mp.mixed_precision),
    Form(
        "masters, bf16 moments to nearest",
        "bfloat16",
        masters(FULL, dtype=jnp.bfloat16, seed=None),
    ),
    Form("compact, no column scales", "bfloat16", compact(column_scales=False)),
    Form("compact", "bfloat16", compact()),
)


def read_library(context: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ASCII codes of most files, and windows of those that are held out."""
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
    """The training of one form, in pieces.

    Attributes:
        row: what is known of it: steps made, stops, curve, held-out losses by window.
    """

    def __init__(self, form: Form, settings: Settings, folder: Path) -> None:
        """Take up the last checkpoint, if there is one."""
        self.settings = settings
        tx = form.wrap(clipped_adamw(settings))
        loss = make_loss(settings, form.dtype)
        steps = make_steps(unscaled_value_and_grad(loss), tx, settings)
        self._train = jax.jit(steps, donate_argnums=(0, 1))
        self._losses = jax.jit(
            lambda params, windows: jax.lax.map(
                lambda w: loss(params, w[None]), windows
            )
        )
        self._checkpoints = ocp.CheckpointManager(
            (folder / form.name.replace(" ", "_")).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=1),
        )
        # Cast between two programs: within one, XLA may drop the rounding.
        params = init_params(jax.random.key(0), settings)
        params = optax_mp.cast_floating(params, form.dtype)
        self.trained = params, jax.jit(tx.init)(params)
        size = sum(x.nbytes for x in jax.tree.leaves(self.trained))
        weights = sum(x.size for x in jax.tree.leaves(params))
        self.row = {"form": form.name, "weights": weights, "steps": 0, "stops": 0}
        self.row |= {"bytes per weight": size / weights, "curve": [], "held out": []}
        if (last := self._checkpoints.latest_step()) is not None:
            args = ocp.args.Composite(
                trained=ocp.args.StandardRestore(self.trained),
                row=ocp.args.JsonRestore(),
            )
            found = self._checkpoints.restore(last, args=args)
            self.trained, self.row = found["trained"], found["row"]
            self.row["stops"] += self.row["steps"] < settings.steps

    def advance(self, text: jax.Array, held_out: jax.Array, until: float) -> None:
        """Train to the end, or until this time, and leave a checkpoint."""
        stride = self.settings.steps // (GATES * POINTS)
        key = jax.random.key(1)
        while (
            first := self.row["steps"]
        ) < self.settings.steps and time.time() < until:
            *trained, mean = self._train(
                *self.trained, text, key, first, first + stride
            )
            self.trained = tuple(trained)
            self.row["steps"] = first + stride
            self.row["curve"].append(float(mean))
            if len(self.row["curve"]) % POINTS == 0:
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


def at_gates(row: record.Row) -> np.ndarray:
    """Return the trailing means of training losses, one a gate."""
    count = len(row["curve"]) // POINTS
    curve = np.asarray(row["curve"][: count * POINTS]).reshape(count, POINTS)
    return curve[:, -TRAILING:].mean(-1)


def verdict(held_out: np.ndarray) -> str:
    """Say what the differences of held-out losses, one a window, come to."""
    return "equal" if abs(held_out.mean()) <= MARGIN else "**not equal**"


def tables_of(rows: list[record.Row]) -> record.Tables:
    """Return the tables: at the end, and on the way."""
    float32, *_ = rows
    ends, ways = [], []
    for row in rows:
        line = {name: row[name] for name in ("form", "weights", "steps", "stops")}
        line |= {"bytes per weight": row["bytes per weight"]}
        if row["held out"]:
            count = min(len(row["held out"]), len(float32["held out"]))
            losses = np.asarray(row["held out"])[count - 1]
            line |= {"held-out loss": float(losses.mean())}
        if row is not float32 and row["held out"]:
            gap = losses - np.asarray(float32["held out"])[count - 1]
            line |= {"above float32's": interval(gap), f"within {MARGIN}": verdict(gap)}
            gates = at_gates(row)[:count] - at_gates(float32)[:count]
            line |= {"gates above": signs(gates)}
            found = np.asarray(row["held out"])[:count].mean(-1)
            found -= np.asarray(float32["held out"])[:count].mean(-1)
            stride = row["steps"] // len(row["held out"])
            for name, gaps in (("training", gates), ("held out", found)):
                shown = {f"{stride * (i + 1)}": f"{x:+.4f}" for i, x in enumerate(gaps)}
                ways.append({"form": row["form"], "loss": name} | shown)
        ends.append(line | {"curve": row["curve"]})
    return {END: ends} | ({WAY: ways} if ways else {})


def train(
    forms: tuple[Form, ...],
    settings: Settings,
    folder: Path,
    until: float,
    windows: int,
) -> list[record.Row]:
    """Train the forms one after the other for as long as there is time."""
    text, held_out = map(jnp.asarray, read_library(settings.context, windows))
    rows = []
    for form in forms:
        run = Run(form, settings, folder)
        run.advance(text, held_out, until)
        rows.append(run.row)
    return rows


def main() -> None:
    """Read the options, train for a while, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="of this piece")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of checkpoints")
    parser.add_argument("--only", nargs="+", help="forms by their names")
    record.add_option(parser)
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes
    forms = tuple(f for f in FORMS if not args.only or f.name in args.only)
    rows = train(forms, replace(SETTINGS, steps=args.steps), args.folder, until, 128)
    tables = tables_of(rows)
    machine = f"{record.machine_of(jax.devices())}, Python {sys.version.split()[0]}"
    packages = ("jax", "optax", "orbax-checkpoint")
    record.finish(args.json, tables, machine, packages)
    for title, lines in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(lines)}")


if __name__ == "__main__":
    main()
