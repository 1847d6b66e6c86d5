"""What a benchmark found, as tables and as a file of `results` beside the script.

A record says when it was made, on what kind of machine, with which versions and by
which command, and holds tables: lists of rows, a row being a value for each column.
`benchmarks/page/evidence.py` makes the page docs/evidence.md of them.
"""

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]
Tables = dict[str, list[Row]]

FOLDER = Path(__file__).parents[1]
BEGAN = time.monotonic()
# Columns that are not listed here show three digits.
FORMATS = {
    "ms": ".2f",
    "ratio": ".2f",
    "bytes per weight": ".2f",
    "temporaries": ".2f",
    "compile s": ".2f",
    "compile ratio": ".2f",
    "loss": ".4f",
    "±": ".4f",
    "to float32": ".3f",
    "held-out loss": ".3f",
    "above float32": "+.3f",
    "peak learning rate": "g",
    "kept MiB": ".1f",
    "error": ".1e",
}
# Times that no record has: results from before times were kept, or none at all.
ABOUT = {
    "evidence": "20 s",
    "fingerprints": "10 s",
    "language": "about 5 h",
    "on_device": "up to 9 min",
    "walk": "10 s",
}
NOT_FINITE = "NaN"
HEAD = "date", "machine", "versions", "command", "seconds", "fingerprints"
# For plots; too long for a table.
NOT_SHOWN = ("losses", "curve")


@dataclass(frozen=True)
class Record:
    """A run of a benchmark.

    Attributes:
        date: of the run, as 2026-11-21.
        machine: its kind, in words.
        versions: of what the result depends on.
        command: what to type for the same again.
        tables: rows by the title of their table.
        seconds: how long the run took; None in older files.
        fingerprints: of the forms that tables name, on the platforms that the result is
            about; None in older files.
    """

    date: str
    machine: str
    versions: dict[str, str]
    command: str
    tables: Tables
    seconds: float | None = None
    fingerprints: dict[str, str] | None = None

    @property
    def script(self) -> str:
        """The name of the script."""
        return self.command.split()[2]

    @property
    def rows(self) -> list[Row]:
        """The rows of all tables."""
        return [row for rows in self.tables.values() for row in rows]


def read(path: Path) -> Record:
    """Return the record that a file holds."""
    return Record(**json.loads(path.read_text(encoding="utf-8")))


def paths() -> dict[str, Path]:
    """Return the files of all results by their names."""
    return {path.stem: path for path in sorted(FOLDER.glob("*/results/*.json"))}


def read_all() -> dict[str, Record]:
    """Return all results by the names of their files."""
    return {name: read(path) for name, path in paths().items()}


def run_times() -> dict[str, str]:
    """Return in words how long each script runs, as its kept results say."""
    seconds: dict[str, list[float]] = {}
    for found in read_all().values():
        seconds.setdefault(found.script, []).append(found.seconds or 0)
    # Of a result in pieces the time may not be known.
    return ABOUT | {k: in_time(sum(v)) for k, v in seconds.items() if all(v)}


def in_time(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def row_of(found: Record, table: str, name: str) -> Row:
    """Return the row of a table whose first cell is `name`."""
    return next(r for r in found.tables[table] if next(iter(r.values())) == name)


def write(path: Path, record: Record) -> None:
    """Write a record to a file, a row a line."""
    tables = ",\n".join(
        f"  {in_json(title)}: [\n"
        + ",\n".join(f"   {in_json(row)}" for row in rows)
        + "\n  ]"
        for title, rows in record.tables.items()
    )
    head = "".join(
        f" {in_json(name)}: {in_json(getattr(record, name))},\n"
        for name in HEAD
        if getattr(record, name) not in (None, {})
    )
    text = f'{{\n{head} "tables": {{\n{tables}\n }}\n}}\n'
    path.write_text(text, encoding="utf-8")


def in_json(value: Any) -> str:
    """Return a value as JSON: numbers in seven digits, "NaN" for what is none."""
    return json.dumps(in_seven_digits(value), ensure_ascii=False, allow_nan=False)


def in_seven_digits(value: Any) -> Any:
    """Round all numbers of a tree of lists and dictionaries; JSON has no NaN."""
    if isinstance(value, dict):
        return {key: in_seven_digits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_seven_digits(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else NOT_FINITE
    return value


def place_in(reference: Sequence[float], values: Sequence[float]) -> str:
    """Say where a mean is, seen from the least and the largest of the reference."""
    mean = fmean(values)
    if mean < min(reference):
        return "under it"
    return "yes" if mean <= max(reference) else "**above it**"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark's command line the option that `finish` wants."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the results as data"
    )


def finish(
    path: Path | None,
    tables: Tables,
    machine: str,
    packages: Sequence[str] = ("jax", "optax"),
    *,
    before: float = 0.0,
) -> None:
    """Write the record of this run, if a path is given.

    `before` is how many seconds earlier pieces of it took.
    """
    if path is None:
        return
    versions = {name: metadata.version(name) for name in packages} | commit()
    date = time.strftime("%Y-%m-%d")
    seconds = before + time.monotonic() - BEGAN
    import fingerprints  # which imports JAX

    command = this_command()
    made = fingerprints.of_result(machine, command, tables)
    write(path, Record(date, machine, versions, command, tables, seconds, made))


def installed(packages: Sequence[str]) -> list[str]:
    """Return which of these packages are here."""
    found = {each.metadata["Name"].lower() for each in metadata.distributions()}
    return [name for name in packages if name in found]


def commit() -> dict[str, str]:
    """Return the commit that is checked out, if this is a checkout."""
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short=10", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": found.stdout.strip()}


def this_command() -> str:
    """Return the command line of this run, but for where it writes."""
    script, *given = sys.argv
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_option(parser)
    _, others = parser.parse_known_args(given)
    return shlex.join(["python", "benchmarks", Path(script).stem, *others])


def machine_of(devices: Sequence[Any]) -> str:
    """Say in words on what kind of machine these JAX devices are."""
    first = devices[0]
    if first.platform != "cpu":
        return f"{len(devices)} x {first.device_kind}"
    count = len(devices)
    return cpu_in_words() + (f", as {count} devices" if count > 1 else "")


def cpu_in_words() -> str:
    """Say what this machine computes with, its accelerators aside."""
    architecture = platform.machine().replace("x86_64", "x86-64")
    return f"{os.cpu_count()} CPU cores, {architecture}"


def heading(devices: Sequence[Any]) -> str:
    """Return the line that benchmarks print before their tables."""
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("jax", "optax")
    )
    return f"{versions}, {machine_of(devices)}, {time.strftime('%Y-%m-%d')}"


def as_markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table, with a column for each key that any row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [column for column in columns if column not in NOT_SHOWN]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [cell(column, row.get(column)) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(column: str, value: Any) -> str:
    """Return a value as its column shows it."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple):
        return ", ".join(cell(column, each) for each in value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return NOT_FINITE
    return format(value, FORMATS[column]) if column in FORMATS else in_digits(value)


def in_digits(value: float) -> str:
    """Return a number in three digits, or with all that are before the point."""
    magnitude = int(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, 2 - magnitude)}f}"
