"""Train a small transformer in several precisions, and compare them with float32.

    pip install -e '.[demo]'
    python examples/demo/demo.py                # a minute or two on two CPU cores
    python examples/demo/demo.py --steps 3000   # plain bfloat16 falls further behind

All forms start from the same weights, see the same batches and use the same AdamW.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from math import isnan
from pathlib import Path
from statistics import fmean

import jax
import numpy as np
from matplotlib.figure import Figure
from model import Settings, read_corpus
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from train import FORMS, STEPS_PER_CALL, Result, calls, compile_form, train

COLORS = ("#D55E00", "#0072B2", "#CC79A7", "0.6", "#56B4E9")  # of FORMS[1:]
PICTURE = Path("optax_mp_demo.png")
WORSE_BY = 0.02  # More than the forms differ by luck of the seed.
AVERAGED = 8  # Points of a curve, in its trailing mean.

NEXT = """
To read next, for your case:
  bfloat16, on TPUs and recent GPUs   README.md, then docs/guide/masters.md
  float16, on older GPUs              docs/guide/loss_scaling.md
  a model in Flax, Equinox or Haiku   docs/guide/frameworks.md, docs/guide/nnx.md
  memory is tight                     docs/guide/memory.md
  you come from torch or jmp          docs/porting.md"""


def main() -> None:
    """Train all forms, print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--no-picture", action="store_true", help=f"no {PICTURE}")
    options = parser.parse_args()
    settings, console = replace(Settings(), steps=options.steps), Console()
    results = train_all(settings, console)
    console.print(make_table(results))
    if not options.no_picture:
        figure = Figure((8, 4.2), layout="constrained")
        draw(figure, results, options.steps)
        figure.savefig(PICTURE, dpi=150)
        console.print(f"The curves: {PICTURE.resolve()}", soft_wrap=True)
    console.print(NEXT, soft_wrap=True)


def train_all(settings: Settings, console: Console) -> list[Result]:
    """Train in all forms, with a bar for the progress."""
    corpus, results = read_corpus(settings.context), []
    total = len(FORMS) * len(settings.seeds) * settings.steps
    with Progress(console=console) as progress:
        task = progress.add_task("compiling", total=total)
        with ThreadPoolExecutor(2) as pool:  # before training, whose times are shown
            programs = pool.map(compile_form, FORMS, repeat(settings), repeat(corpus))
        for program in programs:
            progress.update(task, description=program.form.name)
            report = partial(progress.advance, task)
            results.append(train(program, settings, corpus, report))
    return results


def make_table(results: list[Result]) -> Table:
    """Return the results as a table; what ends above float32 is red."""
    device, first = jax.devices()[0], results[0]
    times = f"Times are from {device.device_kind}."
    if device.platform == "cpu":
        times = "Times are a CPU's, which has no units for 16 bits."
    table = Table(
        caption="Loss in nats per character of held-out text, the mean of "
        f"{len(first.losses)} seeds. {times}",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("form", no_wrap=True)
    for name in "loss", "above float32", "bytes/ weight", "ms/ step", "skipped steps":
        table.add_column(name.replace(" ", "\n"), justify="right")
    for result in results:
        gap = fmean(result.losses) - fmean(first.losses)
        table.add_row(
            result.form.name,
            f"{fmean(result.losses):.3f}",
            "" if result is first or isnan(gap) else f"{gap:+.3f}",
            f"{result.bytes_per_weight:.1f}",
            f"{result.ms_per_step:.1f}",
            "" if result.skipped is None else str(result.skipped),
            style=None if gap < WORSE_BY else "red",
        )
    return table


def draw(figure: Figure, results: list[Result], steps: int) -> None:
    """Draw the losses above float32's: means over seeds, on bands between them."""
    axes = figure.subplots()
    first, *others = results
    at = [stop for _, stop in calls(steps)]
    for result, color in zip(others, COLORS, strict=True):
        gaps = trailing_mean(np.subtract(result.curves, first.curves))
        is_nan = " (NaN)" if np.isnan(gaps).any() else ""
        axes.plot(at, gaps.mean(0), color=color, lw=2, label=result.form.name + is_nan)
        axes.fill_between(at, gaps.min(0), gaps.max(0), color=color, alpha=0.2, lw=0)
    axes.axhline(0, color="0.3", lw=1, ls="--", zorder=0)
    axes.set(
        title="Training loss above float32's, with the band between the seeds",
        xlabel=f"step (each point: the mean of {AVERAGED * STEPS_PER_CALL} steps)",
        ylabel="nats per character",
        xlim=(0, steps),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def trailing_mean(curves: np.ndarray) -> np.ndarray:
    """Return for each point of the curves the mean of the points up to it."""
    ends = range(1, curves.shape[1] + 1)
    means = [curves[:, max(0, end - AVERAGED) : end].mean(1) for end in ends]
    return np.stack(means, axis=1)


if __name__ == "__main__":
    main()
