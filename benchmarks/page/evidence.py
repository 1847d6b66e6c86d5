"""docs/evidence.md, the pages of data behind it, its plots and README's figures.

    python benchmarks evidence            # the page, and the plots with matplotlib
    python benchmarks evidence --no-plots

The texts are beside this script: `evidence.md` of the page, `readme_figures.md` of
README's figures, and one for each page of data, which `docs/conf.py` makes with the
site. A field in braces stands for a figure or the tables of a result:
`{convergence.made}`, `{convergence.tables}`, `{convergence.shown[0]}` for one table,
and for a cell `{amp[0][amp, bf16][trace]}`: the table by its number or title, row,
column. Results of an earlier program say so, their cells by a dagger, and what they
lack is "not made yet".
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import fingerprints
import record
from record import Record

try:
    import plots
except ImportError:  # Without matplotlib.
    plots = None

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEMPLATE = HERE / "evidence.md"
# The folders of the scripts; each has a page of data.
QUESTIONS = ("quality", "memory", "speed", "peers")
PAGE = ROOT / "docs" / "evidence.md"
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
README_FIGURES = HERE / "readme_figures.md"
MARKS = ("<!-- made by benchmarks/page/evidence.py from here -->", "<!-- to here -->")

Records = Mapping[str, Record]


class NotMade:
    """Stands for what no result of this program says; so does each part of it."""

    def __getitem__(self, _: Any) -> "NotMade":
        """Return a part."""
        return self

    def __getattr__(self, _: str) -> "NotMade":
        """Return a part."""
        return self

    def __format__(self, _: str) -> str:
        """Say so on the page."""
        return "(not made yet)"


class Fields(dict[str, Any]):
    """What a template can name; what is missing was not made."""

    def __missing__(self, _: str) -> NotMade:
        """Return what stands for it."""
        return NotMade()


@dataclass(frozen=True)
class Section:
    """What the template can say of a record.

    Attributes:
        record: the record.
        is_stale: whether an earlier program made it.
    """

    record: Record
    is_stale: bool = False

    @property
    def made(self) -> str:
        """By what, when and on what."""
        versions = ", ".join(f"{k} {v}" for k, v in self.record.versions.items())
        made = f"`{self.record.command}`, {self.record.date}"
        made = f"Made by {made} ({self.record.machine}; {versions})."
        return f"{made} **Of an earlier program.**" if self.is_stale else made

    @property
    def shown(self) -> Any:
        """Each table under its title, which the page's contents leave out."""
        return self._by_number_and_title(self._shown())

    @property
    def tables(self) -> str:
        """All tables."""
        return "\n\n".join(shown for _, shown in self._shown())

    def __getitem__(self, table: int | str) -> Any:
        """Return the cells of a table by the first cell of the row, and column."""
        cells = (
            (title, self._fields((next(iter(row.values())), self._cells(row))
                                 for row in rows))
            for title, rows in self.record.tables.items()
        )  # fmt: skip
        return self._by_number_and_title(cells)[table]

    def _cells(self, row: record.Row) -> Any:
        mark = "†" if self.is_stale else ""
        return self._fields(
            (column, record.cell(column, value) + mark)
            for column, value in row.items()
            if column not in record.NOT_SHOWN
        )

    def _shown(self) -> Iterator[tuple[str, str]]:
        note = " (of an earlier program)" if self.is_stale else ""
        for title, rows in self.record.tables.items():
            heading = f"**{title[0].upper()}{title[1:]}**{note}"
            yield title, f"{heading}\n\n{record.as_markdown(rows)}"

    def _by_number_and_title(self, pairs: Iterable[tuple[str, Any]]) -> Any:
        pairs = list(pairs)
        values = [value for _, value in pairs]
        return self._fields([*enumerate(values), *pairs])

    def _fields(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        # Of results of this program, a name that is missing is a mistake.
        return Fields(pairs) if self.is_stale else dict(pairs)


def render(template: str, records: Records) -> str:
    """Return the page: the template with its fields filled in."""
    stale = fingerprints.stale(records)
    sections = {name: Section(each, name in stale) for name, each in records.items()}
    return template.format_map(Fields(sections | figures(records)))


def write_data(folder: Path) -> None:
    """Write the pages of data, which `docs/conf.py` makes with the site."""
    folder.mkdir(exist_ok=True)
    records = record.read_all()
    for question in QUESTIONS:
        template = (HERE / f"{question}.md").read_text(encoding="utf-8")
        page = render(template, records)
        (folder / f"{question}.md").write_text(page, encoding="utf-8")


def with_figures(readme: str, template: str, records: Records) -> str:
    """Return README with the figures between the two marks made anew."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    made = render(template, records)
    return f"{before}{MARKS[0]}\n\n{made}\n{MARKS[1]}{after}"


def figures(records: Records) -> dict[str, Any]:
    """Return what the text says that is not one cell of a table."""
    forms = records["convergence"].rows
    naive = [row for row in forms if row["form"] == "bf16, naive"]
    others = [r for r in forms if r["form"] != "float32" and r not in naive]
    naive_apart = [row["to float32"] - 1 for row in naive]
    rates = records["demo_rates"].rows
    return {
        "runs": {k: f"`{k}`, {v}" for k, v in record.run_times().items()},
        "forms_in_spread": share(row["in its spread"] == "yes" for row in others),
        "naive_in_spread": share(row["in its spread"] == "yes" for row in naive),
        "forms_apart": f"{max(abs(row['to float32'] - 1) for row in others):.1%}",
        "naive_apart": f"{min(naive_apart):.0%} to {max(naive_apart):.0%}",
        "width_steps": next(iter(records["width"].tables)).split()[-2],
        "naive_gap": spread(rates, "plain optax on bfloat16 params"),
        "demo_mean": over_seeds(records["demo"].rows, "held-out loss", mean_of),
        "demo_gaps": over_seeds(records["demo"].rows, "above float32", each_of),
    }


def share(claims: Iterable[bool]) -> str:
    """Return how many of these are true."""
    claims = list(claims)
    return f"{sum(claims)} of {len(claims)}"


def over_seeds(
    rows: list[record.Row], column: str, in_words: Callable[[str, list[float]], str]
) -> dict[str, str]:
    """Return for each run what is said of the values of all seeds, where finite."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row[column] != record.NOT_FINITE:
            found.setdefault(row["run"], []).append(row[column])
    return {run: in_words(column, values) for run, values in found.items()}


def mean_of(column: str, values: list[float]) -> str:
    """Return the mean, as the column shows it."""
    return record.cell(column, fmean(values))


def each_of(column: str, values: list[float]) -> str:
    """Return all values, as the column shows them."""
    return record.cell(column, values)


def spread(rows: list[record.Row], run: str) -> str:
    """Return how far over float32 a run ends, at least and at most, in all settings."""
    gaps = [row["above float32"] for row in rows if row["run"] == run]
    return f"{min(gaps):+.3f} to {max(gaps):+.3f}"


def main() -> None:
    """Write the page, and the plots if matplotlib is here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-plots", action="store_true", help="the page alone")
    args = parser.parse_args()
    records = record.read_all()
    template = TEMPLATE.read_text(encoding="utf-8")
    PAGE.write_text(render(template, records), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    template = README_FIGURES.read_text(encoding="utf-8")
    README.write_text(with_figures(readme, template, records), encoding="utf-8")
    if args.no_plots:
        return
    if plots is None:
        parser.exit(1, "No plots: matplotlib is not installed.\n")
    IMAGES.mkdir(exist_ok=True)
    stale = fingerprints.stale(records)
    for name, plot in plots.PLOTS.items():
        if old := stale.keys() & set(plot.records):
            print(f"{name} is not drawn: {', '.join(old)} are of an earlier program")
        else:
            print(plots.draw(name, records, IMAGES))


if __name__ == "__main__":
    main()
