"""docs/evidence.md, the pages of data behind it, its plots and README's figures.

    python benchmarks evidence            # the page, and the plots with matplotlib
    python benchmarks evidence --no-plots

The texts are beside this script: `evidence.md` of the page, `readme_figures.md` of
README's figures, and one for each page of data, which `docs/conf.py` makes with the
site. A field in braces stands for a figure or the tables of a result:
`{convergence.made}`, `{convergence.tables}`, `{convergence.shown[0]}` for one table,
and for a cell `{amp[0][amp, bf16][trace]}`: the number of the table, row, column.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

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


@dataclass(frozen=True)
class Section:
    """What the template can say of a record."""

    record: Record

    @property
    def made(self) -> str:
        """By what, when and on what."""
        versions = ", ".join(f"{k} {v}" for k, v in self.record.versions.items())
        made = f"`{self.record.command}`, {self.record.date}"
        return f"Made by {made} ({self.record.machine}; {versions})."

    @property
    def shown(self) -> list[str]:
        """Each table under its title, which the page's contents leave out."""
        return [
            f"**{title[0].upper()}{title[1:]}**\n\n{record.as_markdown(rows)}"
            for title, rows in self.record.tables.items()
        ]

    @property
    def tables(self) -> str:
        """All tables."""
        return "\n\n".join(self.shown)

    def __getitem__(self, number: int) -> dict[str, dict[str, str]]:
        """Return the cells of a table by the first cell of the row, and column."""
        rows = list(self.record.tables.values())[number]
        return {
            next(iter(row.values())): {
                k: record.cell(k, v)
                for k, v in row.items()
                if k not in record.NOT_SHOWN
            }
            for row in rows
        }


def render(template: str, records: Records) -> str:
    """Return the page: the template with its fields filled in."""
    sections = {name: Section(each) for name, each in records.items()}
    return template.format(**sections, **figures(records))


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
    for name in plots.PLOTS:
        print(plots.draw(name, records, IMAGES))


if __name__ == "__main__":
    main()
