"""The plots of docs/evidence.md and of the README; `evidence.py` asks for them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from record import Record

Records = Mapping[str, Record]

# Okabe and Ito's colours, which do not look alike to the colour-blind. The first words
# found in a name give its colour, so that a form has the same in all plots.
COLOURS = {
    "#E69F00": ("stochastic",),
    "#CC79A7": ("8-bit", "compact"),
    "#009E73": ("Split", "split"),
    "#D55E00": ("plain bf16", "plain optax, bfloat16", "plain optax on bfloat16"),
    "#56B4E9": ("loss scale", "heavyball"),
    "#999999": ("flashoptim",),
    "#0072B2": ("mixed_precision", "FullCopy", "masters", "amp"),
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


def draw_stall(figure: Any, records: Records) -> None:
    """A weight that stands still, and the losses that come of it."""
    weight, loss = figure.subplots(1, 2)
    for row in records["stall"].rows:
        name = row["optimizer"]
        label = "float32" if "float32" in name else name.split(",")[0]
        weight.plot(*row["curve"], **style_of(name), label=label)
    weight.set(xlabel="updates of -0.001", ylabel="weight", title="one bfloat16 weight")
    weight.legend(loc="lower left")
    rows = records["demo_rates"].rows
    for row in (x for x in rows if x["peak learning rate"] == 0.003):
        name = row["run"].removesuffix(" on bfloat16 params")
        name = name.replace("bfloat16 with masters", "mixed_precision")
        label = f"{name}: {row['held-out loss']:.3f}"
        steps, curve = (x[1:] for x in row["curve"])
        loss.plot(steps, smooth(curve), **style_of(row["run"]), label=label)
    end = max(steps)
    loss.set(xlabel="training step", ylabel="loss, nats per character (smoothed)")
    loss.set(title="a small transformer", xlim=(0.1 * end, end), ylim=(1.4, 2.1))
    loss.legend(title="held-out loss at the end")


def smooth(values: list[float], decay: float = 0.8) -> list[float]:
    """Return the running average, decaying by `decay` from value to value."""
    means, mean = [], values[0]
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
            style = style_of(row["form"]) | MARKERS[place]
            seeds = row["losses"]
            low, high = ([f(x) for x in seeds] for f in (min, max))
            panel.fill_between(widths, low, high, color=style["color"], alpha=0.2, lw=0)
            panel.plot(widths, [fmean(x) for x in seeds], **style, label=row["form"])
        panel.set(xscale="log", yscale="log", xlabel="width", title=title.split(":")[0])
        panel.set_xticks(widths, [str(width) for width in widths])
        panel.minorticks_off()
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5]
    panels[0].set_yticks(ticks, [f"{x:g}" for x in ticks])
    panels[0].set_ylabel("distance from float32 / its way")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center")


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


def draw_language(figure: Any, records: Records) -> None:
    """Each form's training loss above float32's, for each seed."""
    panels = figure.subplots(1, len(LONG_RUNS))
    for panel, (name, title) in zip(panels, LONG_RUNS.items(), strict=True):
        rows = {row["form"]: row for row in next(iter(records[name].tables.values()))}
        steps = rows["float32"]["steps"]
        for form in (x for x in ("plain bf16", "masters", "compact") if x in rows):
            curves = (rows[x]["curve"] for x in (form, "float32"))
            pairs = zip(*curves, strict=False)  # some forms have fewer seeds
            gaps = [smooth(np.subtract(*pair)) for pair in pairs]
            ends = np.linspace(0, steps, len(gaps[0]) + 1)[1:]
            color = colour_of(form)
            panel.plot(ends, np.transpose(gaps), color=color, lw=0.6, alpha=0.5)
            panel.plot(ends, np.mean(gaps, 0), color=color, lw=1.8, label=form)
        panel.axvspan(0.8 * steps, steps, color="0.93", lw=0)
        panel.axhline(0, color="0.5", lw=1, zorder=0)
        panel.set(xlabel="training step", title=title, ylim=(-0.03, 0.06))
    panels[0].set_ylabel("training loss above float32's (smoothed)")
    panels[1].legend(loc="upper right")


LONG_RUNS = {"language": "ten million weights", "nanogpt": "nanoGPT's run"}
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


def draw_rates(figure: Any, records: Records) -> None:
    """How far each form goes by the learning rate, as a share of the exact way."""
    tables = {"from 1.0": "a norm's scale of 1.0", "from N(0, 0.02)": "N(0, 0.02)"}
    panels = figure.subplots(1, len(tables), sharey=True)
    for panel, (table, title) in zip(panels, tables.items(), strict=True):
        for place, row in enumerate(records["rates"].tables[table]):
            form = re.sub(r" \d+\.\d.*", "", row["form"])  # a peer without its version
            cells = {float(k): float(v) for k, v in row.items() if k != "form"}
            style = style_of(form) | MARKERS[place]
            panel.plot(*zip(*cells.items(), strict=True), **style, label=form)
        panel.set(xscale="log", xlabel="learning rate", title=title, ylim=(-0.05, 1.15))
        panel.invert_xaxis()
    panels[0].set_ylabel("way / the exact way")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize=8)


def draw_gradient_release(figure: Any, records: Records) -> None:
    """What a training step holds, with the optimizer's step apart and released."""
    rows = {x["step"]: x for x in records["training_step"].tables["1.3B on one H100"]}
    panels = figure.subplots(1, 2, sharex=True)
    for panel, form in zip(panels, ("masters", "compact"), strict=True):
        for place, end in enumerate((", release", "")):
            row = rows[form + end]
            held = row["peak GB"] - row["temporaries GB"]
            beside = row["temporaries GB"]
            panel.barh(place, held, color="0.85")
            panel.barh(place, beside, left=held, color=RELEASED[end])
            panel.text(row["peak GB"], place, f" {row['peak GB']:.1f}", va="center")
        panel.set(title=form, xlim=(0, 26))
        panel.set(xlabel="GB: params and state (light), temporaries")
        panel.set_yticks((0, 1), ("released", "separate step"))


RELEASED = {"": "#999999", ", release": "#CC79A7"}


class Plot(NamedTuple):
    """An image, 7 inches wide.

    Attributes:
        height: in inches.
        draw: draws it.
        records: the names of the results that it shows.
    """

    height: float
    draw: Callable[[Any, Records], None]
    records: tuple[str, ...]


PLOTS = {
    "stall": Plot(3.2, draw_stall, ("stall", "demo_rates")),
    "width": Plot(3.0, draw_width, ("width",)),
    "finetune": Plot(3.8, draw_finetune, ("finetune",)),
    "language": Plot(3.0, draw_language, tuple(LONG_RUNS)),
    "rates": Plot(3.0, draw_rates, ("rates",)),
    "gradient_release": Plot(2.0, draw_gradient_release, ("training_step",)),
}


def draw(name: str, records: Records, folder: Path) -> Path:
    """Draw one plot; return where it is."""
    plot = PLOTS[name]
    path = folder / f"{name}.png"
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 9}):
        figure = Figure(figsize=(7, plot.height), layout="constrained")
        plot.draw(figure, records)
        # No version of matplotlib in the file.
        figure.savefig(path, dpi=200, metadata={"Software": None})
    return path
