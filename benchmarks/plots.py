"""The plots of docs/evidence.md and of the README; `evidence.py` asks for them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import record
from matplotlib.figure import Figure
from record import Record, row_of

Records = Mapping[str, Record]
LARGE = "16.8M weights in 4 leaves"

# Okabe and Ito's colours, which do not look alike to the colour-blind. The first words
# found in a name give its colour, so that a form has the same in all plots.
COLOURS = {
    "#E69F00": ("stochastic",),
    "#CC79A7": ("8-bit", "5.1 bytes", "compact"),
    "#009E73": ("Split", "split"),
    "#D55E00": ("naive", "plain optax, bfloat16", "cast once"),
    "#56B4E9": ("loss scale", "amp, f16"),
    "#999999": ("written", "loop", "apply_if", "by hand", "casting"),
    "#0072B2": ("mixed_precision", "FullCopy", "masters", "full copies", "amp"),
}


def colour_of(name: str) -> str:
    """Return the colour of a form; float32 is black."""
    for colour, words in COLOURS.items():
        if any(word in name for word in words):
            return colour
    return "black"


def style_of(name: str) -> dict[str, Any]:
    """Return how a line is drawn: float32 broad and pale, to lie under others."""
    if "float32" in name:
        return {"color": "black", "lw": 5, "alpha": 0.3}
    return {"color": colour_of(name), "lw": 1.8}


def draw_bars(panel: Any, rows: list[record.Row], column: str) -> None:
    """Draw a bar for each row, with its value beside it, the first row on top."""
    names = [next(iter(row.values())) for row in rows]
    values = [row[column] for row in rows]
    bars = panel.barh(names, values, color=[colour_of(name) for name in names])
    panel.bar_label(bars, [record.cell(column, v) for v in values], padding=3)
    panel.margins(x=0.25)
    panel.invert_yaxis()


def draw_stall(figure: Any, records: Records) -> None:
    """A weight that stands still, and the losses that come of it."""
    weight, loss = figure.subplots(1, 2)
    for row in records["stall"].rows:
        name = row["optimizer"]
        label = "float32" if "float32" in name else name.split(",")[0]
        weight.plot(*row["curve"], **style_of(name), label=label)
    weight.set(xlabel="updates of -0.001", ylabel="weight", title="one bfloat16 weight")
    weight.legend(loc="lower left")
    for row in records["demo"].rows:
        if row["run"] in ("float32", "bf16 naive", "bf16 + masters"):
            steps, losses = row["curve"][0][1:], smooth(row["curve"][1][1:])
            name = f"{row['run']}: {row['held-out loss']:.3f}"
            loss.plot(steps, losses, **style_of(row["run"]), label=name)
    end = max(steps)
    loss.set(xlabel="training step", ylabel="loss, nats per character (smoothed)")
    loss.set(title="a small transformer", xlim=(0.1 * end, end), ylim=(1.3, 2.0))
    loss.legend(title="held-out loss at the end")


def smooth(values: list[float], decay: float = 0.8) -> list[float]:
    """Return the running average, decaying by `decay` from value to value."""
    means, mean = [], values[0] if values else 0.0
    for value in values:
        mean = decay * mean + (1 - decay) * value
        means.append(mean)
    return means


def draw_convergence(figure: Any, records: Records) -> None:
    """Mean and deviation of each form's loss, a panel for each task."""
    tables = records["convergence"].tables
    panels = figure.subplots(1, len(tables), sharey=True)
    for panel, (title, rows) in zip(panels, tables.items(), strict=True):
        first = rows[0]
        low, high = first["loss"] - first["±"], first["loss"] + first["±"]
        panel.axvspan(low, high, color="0.9")
        for place, row in enumerate(rows):
            panel.errorbar(
                row["loss"], place, xerr=row["±"], fmt="o", color=colour_of(row["form"])
            )
            # From a run of now, where the file has them.
            for loss in row.get("losses", ()):
                panel.plot(loss, place, ".", color="0.4", ms=3)
        panel.set_yticks(range(len(rows)), [row["form"] for row in rows])
        panel.set(title=title.split(",")[0], xlabel="held-out loss")
    panels[0].invert_yaxis()


def draw_step_time(figure: Any, records: Records) -> None:
    """Step times as ratios."""
    panel = figure.subplots()
    draw_bars(panel, records["optimizer_step"].tables[LARGE], "ratio")
    panel.axvline(1, color="0.5", lw=1, zorder=0)
    panel.set_xlabel("time of an AdamW step / that of plain float32 optax")


def draw_memory(figure: Any, records: Records) -> None:
    """Step time over bytes per weight."""
    panel = figure.subplots()
    shown = {
        "optimizer_step": {
            "plain optax, float32": "float32",
            "naive bf16": "naive bf16",
            "mixed_precision, bf16, bf16 gradients": "full copies",
        },
        "split": {
            "Split(16), bf16, bf16 gradients": "Split(16)",
            "Split(8), bf16, bf16 gradients": "Split(8)",
            "Split(8), 8-bit state, bf16, bf16 gradients": "Split(8), 8-bit state",
        },
    }
    for result, names in shown.items():
        for full, name in names.items():
            row = row_of(records[result], LARGE, full)
            x, y = row["bytes per weight"], row["ratio"]
            panel.plot(x, y, "o", ms=9, color=colour_of(name))
            is_right = name in ("Split(8)", "float32")
            panel.annotate(
                name,
                (x, y),
                xytext=(-8 if is_right else 8, 6),
                textcoords="offset points",
                ha="right" if is_right else "left",
            )
    panel.set(xlim=(0, 16), ylim=(0, 5), xlabel="bytes per weight, params included")
    panel.set_ylabel("step time / float32's, on a CPU")


def draw_amp(figure: Any, records: Records) -> None:
    """What the forward pass keeps, and the error of the gradient of a reused weight."""
    kept, error = figure.subplots(1, 2)
    model, _, reuse = records["amp"].tables.values()
    draw_bars(kept, model, "kept MiB")
    kept.set_xlabel("MiB kept for the backward pass")
    uses = [row["uses"] for row in reuse]
    for column in ("cast once", "amp: a cast for each use"):
        errors = [row[column] for row in reuse]
        label = column.split(":")[0]
        error.loglog(uses, errors, "o-", color=colour_of(column), label=label)
    error.set(xlabel="uses of a weight in a scan", ylabel="relative error of gradient")
    error.legend()


def draw_scale_plan(figure: Any, records: Records) -> None:
    """GB that each device holds of a 70B model."""
    panel = figure.subplots()
    title = next(t for t in records["scale_plan"].tables if t.startswith("70B"))
    styles = {"replicated": ":", "zero1": "--", "fully sharded": "-"}
    for row in records["scale_plan"].tables[title]:
        (_, form), (_, layout), *cells = row.items()
        if form in ("float32", "full copies", "5.1 bytes"):
            panel.loglog(
                [int(devices) for devices, _ in cells],
                [held for _, (held, _) in cells],
                styles[layout],
                **style_of(form),
                label=f"{form}, {layout}",
            )
    panel.set(xlabel="devices", ylabel="GB on each device")
    panel.set_title(f"AdamW, {title.split(':')[1].strip()}")
    panel.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4096"])
    panel.xaxis.minorticks_off()
    panel.yaxis.set_major_formatter("{x:g}")
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_demo(figure: Any, records: Records) -> None:
    """How far over float32 the demo's other runs are on the way."""
    panel = figure.subplots()
    first, *others = records["demo"].rows
    reference = smooth(first["curve"][1])
    for row in others:
        steps, losses = row["curve"]
        label = f"{row['run']}: {record.cell('above float32', row['above float32'])}"
        if record.NOT_FINITE in losses:
            # Nothing to draw: it is over after the first steps.
            steps, losses = steps[:0], losses[:0]
        gaps = [a - b for a, b in zip(smooth(losses), reference, strict=False)]
        style = style_of(row["run"])
        style["ls"] = "--" if row["run"].startswith("f16") else "-"
        panel.plot(steps, gaps, **style, label=label)
    panel.axhline(0, color="0.5", lw=1)
    panel.set(xlabel="training step", ylabel="loss above float32's (smoothed)")
    panel.legend(title="held-out, at the end")


def draw_demo_rates(figure: Any, records: Records) -> None:
    """How far over float32 naive bfloat16 ends, by learning rate."""
    panel = figure.subplots()
    everything = records["demo_rates"].rows
    ticks = sorted({row["peak learning rate"] for row in everything})
    for run in ("bf16 naive", "bf16 + masters"):
        rows = [row for row in everything if row["run"] == run]
        rates = [row["peak learning rate"] for row in rows]
        gaps = [row["above float32"] for row in rows]
        # Rings and dots, for where they meet.
        style = {"mfc": "none", "ms": 10} if "masters" in run else {"ms": 6}
        panel.semilogx(rates, gaps, "o", color=colour_of(run), label=run, **style)
    panel.axhline(0, color="0.5", lw=1)
    panel.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    panel.minorticks_off()
    panel.set(xlabel="peak learning rate", ylabel="held-out loss above float32's")
    panel.legend()


def draw_conformance(figure: Any, records: Records) -> None:
    """Checks that pass, by area."""
    panel = figure.subplots()
    rows = next(iter(records["conformance"].tables.values()))
    draw_bars(panel, rows, "passed")
    for bar in panel.patches:
        bar.set_color("#0072B2")
    panel.set_xlabel("checks passed")


Draw = Callable[[Any, Records], None]
# Name of the image: (inches high, what draws it); all are 7 inches wide.
PLOTS: dict[str, tuple[float, Draw]] = {
    "stall": (3.2, draw_stall),
    "convergence": (3.2, draw_convergence),
    "demo": (3.6, draw_demo),
    "demo_rates": (3.0, draw_demo_rates),
    "step_time": (5.0, draw_step_time),
    "memory": (3.4, draw_memory),
    "amp": (3.0, draw_amp),
    "scale_plan": (3.6, draw_scale_plan),
    "conformance": (3.4, draw_conformance),
}


def draw(name: str, records: Records, folder: Path) -> Path:
    """Draw one plot; return where it is."""
    height, draw_in = PLOTS[name]
    path = folder / f"{name}.png"
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 9}):
        figure = Figure(figsize=(7, height), layout="constrained")
        draw_in(figure, records)
        # No version of matplotlib in the file.
        figure.savefig(path, dpi=200, metadata={"Software": None})
    return path
