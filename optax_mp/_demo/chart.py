"""Line charts as SVG, from the standard library alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.etree.ElementTree import Element

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 30, 44
BAR_HEIGHT = 24
VALUE_WIDTH = 50
STYLE_COUNT = 8
# Dashes tell runs apart without colours, and where one line lies on another.
DASHES = ("none", "8 3", "2 3", "10 3 2 3")

Point = tuple[float, float]
Tick = tuple[float, str]


class Series(NamedTuple):
    """The points of a run; `style` numbers the runs, `end` says why it ended early.

    `band` has the least and the largest value of the seeds, around the points.
    """

    name: str
    style: int
    points: Sequence[Point]
    end: str = ""
    band: Sequence[tuple[Point, Point]] = ()


@dataclass(frozen=True)
class Axis:
    """The range of an axis, its ticks with their labels, and what it measures."""

    label: str
    low: float
    high: float
    ticks: Sequence[Tick]

    def share(self, value: float) -> float:
        """Return how far along the axis a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def element(tag: str, *children: Element | str, **attributes: object) -> Element:
    """Return an element; `class_`, `font_size` become `class`, `font-size`."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    made = Element(tag, {names[name]: str(attributes[name]) for name in attributes})
    for child in children:
        if isinstance(child, str):
            made.text = (made.text or "") + child
        else:
            made.append(child)
    return made


def linear_axis(label: str, values: Iterable[float], at_least: float = 1.0) -> Axis:
    """Return an axis over values, `at_least` so long, with four to ten round ticks."""
    values = list(values) or [0.0]
    low, high = min(values), max(values)
    high = max(high, low + at_least)
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = max(power * k for k in (1, 2, 5) if power * k <= (high - low) / 4)
    # The small terms absorb rounding errors, which would add a tick or a digit.
    first, last = math.floor(low / step + 1e-3), math.ceil(high / step - 1e-3)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [(i * step, f"{i * step:.{digits}f}") for i in range(first, last + 1)]
    return Axis(label, first * step, last * step, ticks)


def log_axis(label: str, values: Iterable[float]) -> Axis:
    """Return an axis over natural logarithms, with ticks at round values."""
    values = [math.exp(value) for value in values] or [1.0]
    low, high = min(values) * 0.95, max(values) * 1.05
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_values = [m * 10.0**k for k in powers for m in (1, 1.5, 2, 3, 4, 5, 7)]
    ticks = [(math.log(v), f"{v:g}") for v in round_values if low <= v <= high]
    return Axis(label, math.log(low), math.log(high), ticks)


def line_chart(title: str, x: Axis, y: Axis, all_series: Sequence[Series]) -> Element:
    """Return axes, and a curve for each series."""
    chart = element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="chart")
    chart.append(element("title", title))
    chart.append(text(LEFT, 18, title, class_="heading"))
    chart.extend(axis_lines(x, y))
    chart.extend(band(series, x, y) for series in all_series if series.band)
    chart.extend(curve(series, x, y) for series in all_series)
    return chart


def axis_lines(x: Axis, y: Axis) -> list[Element]:
    """Return grid lines, ticks and labels of both axes."""
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = []
    for value, label in y.ticks:
        at = y_position(value, y)
        parts.append(straight_line(LEFT, at, WIDTH - RIGHT, at, class_="grid"))
        parts.append(text(LEFT - 6, at + 4, label, text_anchor="end"))
    for value, label in x.ticks:
        at = x_position(value, x)
        parts.append(straight_line(at, bottom, at, bottom + 5, class_="axis"))
        parts.append(text(at, bottom + 18, label, text_anchor="middle"))
    parts.append(straight_line(LEFT, bottom, WIDTH - RIGHT, bottom, class_="axis"))
    parts.append(straight_line(LEFT, TOP, LEFT, bottom, class_="axis"))
    center = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text(center, HEIGHT - 8, x.label, text_anchor="middle"))
    turned = f"rotate(-90 14 {middle:g})"
    parts.append(text(14, middle, y.label, text_anchor="middle", transform=turned))
    return parts


def curve(series: Series, x: Axis, y: Axis) -> Element:
    """Return the line of a series, with a cross where it ends early."""
    name = f"{series.name}: {series.end}" if series.end else series.name
    group = element("g", element("title", name), class_="curve", data_run=series.name)
    positions = [(x_position(a, x), y_position(b, y)) for a, b in series.points]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in positions)
    group.append(element("polyline", points=points, **line_style(series.style)))
    if series.end and positions:
        a, b = positions[-1]
        cross = f"M{a - 5:.1f} {b - 5:.1f}l10 10m0 -10l-10 10"
        group.append(element("path", d=cross, class_=f"line run{shade(series.style)}"))
    return group


def band(series: Series, x: Axis, y: Axis) -> Element:
    """Return the area between the seeds of a series."""
    low, high = zip(*series.band, strict=True)
    corners = [(x_position(a, x), y_position(b, y)) for a, b in (*low, *high[::-1])]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return element("polygon", points=points, class_=f"band run{shade(series.style)}")


def shade(style: int) -> int:
    """Return the number of a run's colour."""
    return style % STYLE_COUNT


def line_style(style: int) -> dict[str, object]:
    """Return class and dashes of a line. The first is wide, since others lie on it."""
    dashes = DASHES[(style + style // STYLE_COUNT) % len(DASHES)]
    width = "wide " if style == 0 else ""
    return {
        "class_": f"line {width}run{shade(style)}",
        "stroke_dasharray": dashes,
    }


def text(x: float, y: float, words: str, **attributes: object) -> Element:
    """Return a text at a position."""
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def straight_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    """Return a straight line."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return element("line", class_=class_, **{k: f"{v:.1f}" for k, v in ends.items()})


def x_position(value: float, axis: Axis) -> float:
    """Return where a value on the horizontal axis lies."""
    return LEFT + (WIDTH - LEFT - RIGHT) * axis.share(value)


def y_position(value: float, axis: Axis) -> float:
    """Return where a value on the vertical axis lies."""
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * axis.share(value)
