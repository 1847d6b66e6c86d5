"""The page of the demo: one HTML file that needs no other."""

import math
import statistics
from collections.abc import Sequence
from xml.etree.ElementTree import Element, tostring

from optax_mp._demo.chart import (
    STYLE_COUNT,
    Axis,
    Series,
    element,
    line_chart,
    line_style,
    linear_axis,
    log_axis,
)
from optax_mp._demo.report import TITLES, cells_of, diverged_at, verdict
from optax_mp._demo.train import Result

# A colour for each run, on light and dark backgrounds. The first is grey, since other
# curves lie on it.
LIGHT = "#9a9a9a #c2410c #0b6bcb #0a7d55 #b0229c #6d4de0 #8a6d00 #0e7490".split()
DARK = "#8a8a8a #ff8f5a #62b0ff #3ecf95 #f07be0 #a793ff #e0c04a #4fd0e0".split()
STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #ffffff; --grid: #dddddd;
  LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --page: #16181c; --grid: #3a3d44; DARK } }
body { background: var(--page); color: var(--text); max-width: 50rem; margin: 2rem auto;
  padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.2rem 0.6rem;
  border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
ul { list-style: none; padding: 0; }
li { display: inline-block; margin-right: 1.2rem; }
li svg { width: 40px; height: 12px; margin-right: 0.4rem; }
.chart { width: 100%; height: auto; display: block; margin: 1.2rem 0; }
.chart text { fill: var(--text); font-size: 12px; }
.chart .heading { font-size: 14px; font-weight: 600; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--text); }
.line { fill: none; stroke-width: 2; }
.band { stroke: none; opacity: 0.2; }
.wide { stroke-width: 5; }
"""
CURVE_POINTS = 300
# The share of a run over which curves are averaged: batches are small.
SMOOTHED_SHARE = 0.05


def as_html(introduction: str, command: str, results: Sequence[Result]) -> str:
    """Return the page: what was done, the verdict, the table, and two charts."""
    title = "optax_mp: one model, trained in several precisions"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("style", style()),
    )
    body = element(
        "body",
        element("h1", title),
        element("p", introduction),
        element("p", verdict(results)),
        table(results),
        legend(results),
        losses_chart(results),
        gaps_chart(results),
        element("p", "Lines are means over seeds; a band lies between its seeds."),
        element("p", "Made by ", element("code", command)),
    )
    page = element("html", head, body, lang="en")
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode") + "\n"


def style() -> str:
    """Return the style sheet, with the colours of runs as variables."""

    def variables(colors: Sequence[str]) -> str:
        return " ".join(f"--run{i}: {color};" for i, color in enumerate(colors))

    rules = [
        f".line.run{i} {{ stroke: var(--run{i}); }}\n"
        f".band.run{i} {{ fill: var(--run{i}); }}\n"
        for i in range(STYLE_COUNT)
    ]
    sheet = STYLE.replace("LIGHT", variables(LIGHT)).replace("DARK", variables(DARK))
    return sheet + "".join(rules)


def table(results: Sequence[Result]) -> Element:
    """Return the table that the terminal shows as well."""
    titles = element("tr", *(element("th", title, scope="col") for title in TITLES))
    rows = [
        element("tr", *(element("td", cell) for cell in cells_of(result, results[0])))
        for result in results
    ]
    return element("table", element("thead", titles), element("tbody", *rows))


def legend(results: Sequence[Result]) -> Element:
    """Return the line of each run beside its name."""
    items = []
    for i, result in enumerate(results):
        line = element("line", x1=0, y1=6, x2=40, y2=6, **line_style(i))
        end = ending(result)
        name = element("span", f"{result.name} ({end})" if end else result.name)
        items.append(element("li", element("svg", line, viewBox="0 0 40 12"), name))
    return element("ul", *items, class_="legend")


def losses_chart(results: Sequence[Result]) -> Element:
    """Return the chart of training losses, the means over seeds."""
    all_series = [
        Series(
            result.name,
            i,
            [(x, math.log(max(loss, 1e-9))) for x, loss in mean_of(losses_of(result))],
            ending(result),
        )
        for i, result in enumerate(results)
    ]
    y = log_axis("nats per character", heights(all_series))
    return line_chart("Training loss", steps_axis(results), y, all_series)


def gaps_chart(results: Sequence[Result]) -> Element:
    """Return the chart of how far losses are above those of the first run.

    All runs see the same batches, so that most of the noise cancels. What is left
    shows as the distance between seeds.
    """
    first = losses_of(results[0])
    all_series = []
    for i, result in enumerate(results):
        seeds = zip(losses_of(result), first, strict=True)
        gaps = [gaps_between(points, base) for points, base in seeds]
        band = band_of(gaps) if len(gaps) > 1 else ()
        all_series.append(Series(result.name, i, mean_of(gaps), ending(result), band))
    y = linear_axis("nats per character", [0.0, *heights(all_series)], at_least=0.02)
    title = f"Training loss above {results[0].name}, on the same batches"
    return line_chart(title, steps_axis(results), y, all_series)


Points = list[tuple[float, float]]


def losses_of(result: Result) -> list[Points]:
    """Return steps and losses of a run for each seed, averaged over neighbours."""
    return [smooth(list(zip(c.steps, c.losses, strict=True))) for c in result.curves]


def gaps_between(points: Points, base: Points) -> Points:
    """Return how far points are above others, where both are."""
    # A first run that diverged has no losses to compare with from then on.
    others = dict(base)
    return [(step, loss - others[step]) for step, loss in points if step in others]


def mean_of(all_points: Sequence[Points]) -> Points:
    """Return the mean over seeds, as far as all of them go."""
    columns = zip(*all_points, strict=False)
    return [(at[0][0], statistics.fmean(value for _, value in at)) for at in columns]


def band_of(
    all_points: Sequence[Points],
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the least and the largest point over seeds, as far as all of them go."""
    return [(min(at), max(at)) for at in zip(*all_points, strict=False)]


def steps_axis(results: Sequence[Result]) -> Axis:
    """Return the axis of steps, from 0 to the last of any run."""
    last = max(curve.steps[-1] for result in results for curve in result.curves)
    return linear_axis("step", [0.0, float(last)], at_least=4.0)


def heights(all_series: Sequence[Series]) -> list[float]:
    """Return the y values of all points."""
    points = [series.points for series in all_series]
    bands = [pair for series in all_series for pair in series.band]
    return [value for each in (*points, *bands) for _, value in each]


def ending(result: Result) -> str:
    """Return why a run ended early, or an empty string."""
    step = diverged_at(result)
    return "" if step is None else f"NaN by step {step}"


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return moving averages of the finite points, over fewer neighbours near the ends.

    The first and the last point stay as they are.
    """
    points = [point for point in points if math.isfinite(point[1])]
    reach = int(len(points) * SMOOTHED_SHARE / 2)
    means = []
    for i in range(0, len(points), max(1, len(points) // CURVE_POINTS)):
        near = min(reach, i, len(points) - 1 - i)
        values = [value for _, value in points[i - near : i + near + 1]]
        means.append((points[i][0], sum(values) / len(values)))
    return means
