"""The plots of docs/evidence.md and of the README; `evidence.py` asks for them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import record
from matplotlib.figure import Figure
from record import Record

Records = Mapping[str, Record]

# Okabe and Ito's colours, which do not look alike to the colour-blind. The first words
# found in a name give its colour, so that a form has the same in all plots.
COLOURS = {
    "#E69F00": ("stochastic",),
    "#CC79A7": ("8-bit", "5.1 bytes", "compact"),
    "#009E73": ("Split", "split"),
    "#D55E00": (
        "naive",
        "plain bf16",
        "plain optax, bfloat16",
        "plain optax on bfloat16",
        "cast once",
    ),
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
    names = {
        "float32": "float32",
        "plain optax on bfloat16 params": "plain optax",
        "bfloat16 with masters": "mixed_precision",
    }
    for name, short_name in names.items():
        rows = [row for row in records["demo_full"].rows if row["run"] == name]
        steps, curves = rows[0]["curve"][0][1:], [row["curve"][1][1:] for row in rows]
        held_out = fmean(row["held-out loss"] for row in rows)
        label = f"{short_name}: {held_out:.3f}"
        loss.plot(steps, smooth(mean_of(curves)), **style_of(name), label=label)
    end = max(steps)
    loss.set(xlabel="training step", ylabel="loss, nats per character (smoothed)")
    loss.set(title="a small transformer", xlim=(0.1 * end, end), ylim=(1.4, 2.1))
    loss.legend(title="held-out loss at the end")


def mean_of(curves: list[list[float]]) -> list[float]:
    """Return the mean of the curves of several seeds."""
    return [fmean(values) for values in zip(*curves, strict=True)]


def smooth(values: list[float], decay: float = 0.8) -> list[float]:
    """Return the running average, decaying by `decay` from value to value."""
    means, mean = [], values[0] if values else 0.0
    for value in values:
        mean = decay * mean + (1 - decay) * value
        means.append(mean)
    return means


def draw_width(figure: Any, records: Records) -> None:
    """How far each form is off float32, by the width of the model, with all seeds."""
    tables = records["width"].tables
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for panel, (title, rows) in zip(panels, tables.items(), strict=True):
        for place, row in enumerate(rows):
            widths = [int(x.split()[1]) for x in row if x.startswith("width")]
            seeds = [list(x) for x in zip(*row["losses"], strict=True)]
            style = style_of(row["form"]) | MARKERS[place]
            draw_with_band(panel, widths, seeds, row["form"], style)
        panel.set(xscale="log", yscale="log", xlabel="width", title=title.split(":")[0])
        panel.set_xticks(widths, [str(width) for width in widths])
        panel.minorticks_off()
    panels[0].set_ylabel("distance from float32 / its way")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")


def draw_amp(figure: Any, records: Records) -> None:
    """What the forward pass keeps, and the error of the gradient of a reused weight."""
    kept, error = figure.subplots(1, 2)
    model, reuse = records["amp"].tables.values()
    draw_bars(kept, model, "kept MiB")
    kept.set_xlabel("MiB kept for the backward pass")
    uses = [row["uses"] for row in reuse]
    for column in ("cast once", "amp: a cast for each use"):
        errors = [row[column] for row in reuse]
        label = column.split(":")[0]
        error.loglog(uses, errors, "o-", color=colour_of(column), label=label)
    error.set(xlabel="uses of a weight in a scan", ylabel="relative error of gradient")
    error.legend()


def draw_with_band(
    panel: Any,
    steps: list[int],
    curves: list[list[float]],
    label: str,
    style: dict[str, Any],
) -> None:
    """Draw the mean of curves, on the band that they span."""
    low, high = zip(
        *((min(at), max(at)) for at in zip(*curves, strict=True)), strict=True
    )
    panel.fill_between(steps, low, high, color=style["color"], alpha=0.2, lw=0)
    panel.plot(steps, mean_of(curves), **style, label=label)


def draw_finetune(figure: Any, records: Records) -> None:
    """How far over float32 the forms are at the gates: all, and without plain bf16."""
    everything, near = figure.subplots(1, 2)
    rows = records["finetune"].tables[AT_GATES]
    for place, row in enumerate(rows):
        steps = [int(column) for column in row if column != "form"]
        means, halves = zip(
            *(mean_and_half(row[str(step)]) for step in steps), strict=True
        )
        style = style_of(row["form"]) | MARKERS[place]
        everything.plot(steps, means, **style, label=row["form"])
        if row["form"] == "plain bf16":
            continue
        # Side by side, so that the intervals do not hide each other.
        beside = [step + 12 * (place - len(rows) / 2) for step in steps]
        near.errorbar(beside, means, halves, elinewidth=1, **style)
    for panel in (everything, near):
        panel.axhline(0, color="0.5", lw=1, zorder=0)
        panel.set(xlabel="step of fine-tuning")
    everything.set(ylabel="training loss above float32's", title="all forms")
    near.set(title="all but plain bf16, with 95% intervals")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)


AT_GATES = "trailing training loss above float32's, at each gate"
MARKERS = [
    {"marker": marker, "ms": 4, "ls": line, "lw": 1.2}
    for line, markers in (("-", "os^v"), ("--", "Dphx"), (":", "<>"))
    for marker in markers
]


def mean_and_half(cell: str) -> tuple[float, float]:
    """Return the numbers of "mean ± half width of the interval"."""
    mean, _, half = cell.partition(" ± ")
    return float(mean), float(half or "0")


def draw_failures(figure: Any, records: Records) -> None:
    """Rows that few batches touch, and updates under half a unit by learning rate."""
    rare, tail = figure.subplots(1, 2)
    tables = list(records["failures"].tables.values())
    for place, row in enumerate(tables[0]):
        name, *cells = row.values()
        style = style_of(name) | MARKERS[place]
        rare.plot(list(row)[1:], [float(cell) for cell in cells], **style, label=name)
    rare.set(ylabel="distance left to the goal", title="rows of an embedding")
    rare.tick_params(axis="x", labelsize=7)
    rare.set_xlabel("how often a batch had the token")
    rare.legend(fontsize=6)
    rates = [float(row["learning rate"]) for row in tables[-1]]
    for column, marker in (("stalled", "o"), ("predicted", "--")):
        shares = [float(row[column].rstrip("%")) for row in tables[-1]]
        tail.semilogx(rates, shares, marker, color="#D55E00", label=column)
    tail.set(xlabel="learning rate of Adam", title="updates under half a bf16 unit")
    tail.set(ylabel="% of updates")
    tail.legend()


def draw_codes(figure: Any, records: Records) -> None:
    """How far 8-bit Adams are from float32's, by what a matrix's gradients are like."""
    panel = figure.subplots()
    rows = records["comparisons"].tables["8-bit Adam, 200 steps"]
    rows = [row for row in rows if "8" in row["Adam"]]
    columns = [column for column in rows[0] if column.startswith("error, ")]
    colours = ("#CC79A7", "#E8C1D8", "#0072B2", "#999999")
    for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        at = [place + 0.2 * (i - 1.5) for place in range(len(columns))]
        errors = [row[column] for column in columns]
        bars = panel.bar(at, errors, 0.19, color=colour, label=row["Adam"])
        panel.bar_label(bars, [record.cell("", x) for x in errors], fontsize=7)
    panel.set_yscale("log")
    panel.margins(y=0.1)
    panel.set_xticks(range(len(columns)), [c.partition(", ")[2] for c in columns])
    panel.set_ylabel("distance to float32 / its way")
    panel.legend(fontsize=7)


def draw_accelerators(figure: Any, records: Records) -> None:
    """What a step of AdamW and a transformer's training step move on a TPU and GPU."""
    tables = records["accelerators"].tables
    panels = figure.subplots(2, 2, sharey="row", height_ratios=(8, 7))
    for (above, below), target in zip(panels.T, ("TPU v5e", "H100"), strict=True):
        rows = tables[f"AdamW, compiled for {target}"]
        draw_ways(above, [row for row in rows if row["form"] in MOVED_BY])
        above.set(title=target, xlabel="bytes per weight, AdamW", xlim=(0, 50))
        title = f"Training step of a transformer, compiled for {target}"
        draw_bars(below, tables[title], "GB moved")
        below.set_xlabel("GB, a transformer's training step")
    panels[0, 0].invert_yaxis()
    panels[1, 0].invert_yaxis()  # which `draw_bars` did twice, of axes that are shared
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


MOVED_BY = (
    "float32",
    "masters",
    "loss scale",
    "Split(16)",
    "Split(8)",
    "5.1 bytes",
    "stochastic rounding",
)


def draw_ways(panel: Any, rows: list[record.Row]) -> None:
    """Draw what forms move by `tx.update` and by `take_step`, and the limit."""
    names = [row["form"] for row in rows]
    by_update = [row["moved"] for row in rows]
    panel.barh(names, by_update, color="0.85", label="tx.update")
    panel.barh(
        names,
        [row["moved, take_step"] for row in rows],
        height=0.5,
        color=[colour_of(name) for name in names],
        label="take_step (in colours)",
    )
    limits = [row["limit"] for row in rows]
    panel.plot(limits, names, "k|", ms=12, label="the limit: each array once")
    for name, moved in zip(names, by_update, strict=True):
        if moved > 50:
            panel.text(49, name, f"{moved:.0f} →", ha="right", va="center")


def draw_gradient_release(figure: Any, records: Records) -> None:
    """What a training step holds, from the first layer to the optimizer's step."""
    (rows,) = records["training_step_release"].tables.values()
    panels = figure.subplots(1, 2, sharey=True)
    for panel, form in zip(panels, ("masters", "5.1 bytes"), strict=True):
        for way, name in (("take_step", "separate step"), ("release", "released")):
            (row,) = (x for x in rows if x["step"] == f"{form} unclipped, {way}")
            weights = row["gradients GB"] / 2  # of which the record has float32 ones
            held, color = row["state GB"] + weights, RELEASED[name]
            of_layers = weights * (1 if way == "take_step" else 1 / LAYERS)
            points = timeline(held, row["peak GB"], of_layers)
            panel.plot(*zip(*points, strict=True), color=color, label=name)
            panel.text(1.1, row["peak GB"], f"{row['peak GB']:.1f}", color=color)
        panel.axhspan(0, held, color="0.93", lw=0)
        panel.text(0.05, held / 2, "params and state", color="0.4")
        panel.set(title=form, ylim=(0, 24), xticks=(0.5, 1.5, 2.25))
        panel.set_xticklabels(["forward", "backward", "step"])
    panels[0].set_ylabel("GB, 1.3 billion weights, H100")
    panels[0].legend(loc="lower right")


# Of 1.3 billion weights and 4 sequences of 1024 tokens: layers, and the GB that these
# hand on and keep for the backward pass.
LAYERS, ACTIVATIONS = 24, 0.4
RELEASED = {"separate step": "#999999", "released": "#CC79A7"}


def timeline(held: float, peak: float, gradients: float) -> list[tuple[float, float]]:
    """Return times and sizes; XLA holds all gradients from the loss on."""
    return [
        (0, held),
        (1, held + ACTIVATIONS),
        (1, peak),  # the logits
        (1.06, peak),
        (1.06, held + ACTIVATIONS + gradients),
        (2, held + gradients),
        (2.5, held + gradients),
        (2.5, held),
    ]


Draw = Callable[[Any, Records], None]
# Name of the image: (inches high, what draws it); all are 7 inches wide.
PLOTS: dict[str, tuple[float, Draw]] = {
    "stall": (3.2, draw_stall),
    "width": (3.4, draw_width),
    "finetune": (3.8, draw_finetune),
    "failures": (3.4, draw_failures),
    "codes": (3.2, draw_codes),
    "accelerators": (5.2, draw_accelerators),
    "amp": (3.0, draw_amp),
    "gradient_release": (3.0, draw_gradient_release),
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
