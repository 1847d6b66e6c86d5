"""How many checks pass, by area, counted from pytest's own report.

    python benchmarks conformance               # the default run of these files
    python benchmarks conformance --everything  # the slow checks, too: 15 minutes
    python benchmarks conformance --junit report.xml  # of `pytest --junitxml=...`
    python benchmarks conformance --json FILE   # the tables as data, too

A check is one case that pytest reports: a test function with one choice of optimizer,
dtype, storage or model. What the run leaves out, being marked slow, is counted, too.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import record

HERE = Path(__file__).parents[2]
CONTRACT = "test_contract"
# Area: its files in tests/.
AREAS = {
    "masters move as bare optax moves float32": (CONTRACT,),
    "optax's own test modules, with masters": ("test_optax_suite",),
    "nesting with optax's wrappers": ("test_nesting",),
    "loss scale": ("test_rule", "test_values", "test_transform", "test_overwrite"),
    "bad steps, against a NumPy system": ("test_faults",),
    "rounding to all formats": ("test_dtypes",),
    "split masters": ("test_split",),
    "low-bit moments": ("test_low_bit",),
    "stochastic rounding": ("test_stochastic",),
    "amp: primitives and programs": ("test_amp_cases",),
    "amp: models of all frameworks": ("test_amp_models",),
}

Case = tuple[str, str]


def pytest_arguments(everything: bool) -> list[str]:
    """Return the command line of a run over all files."""
    names = {name for names in AREAS.values() for name in names}
    found = sorted((HERE / "tests").rglob("test_*.py"))
    files = [str(path.relative_to(HERE)) for path in found if path.stem in names]
    chosen = ["-m", ""] if everything else []
    return [sys.executable, "-m", "pytest", "-q", *chosen, *files]


def run(arguments: list[str]) -> dict[Case, str]:
    """Run the checks; return the outcome of each case."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run([*arguments, f"--junitxml={report}"], cwd=HERE, check=False)
        return dict(outcomes_in(report))


def outcomes_in(report: Path) -> Iterator[tuple[Case, str]]:
    """Yield ((file, check), outcome) for each case of pytest's report."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].split(".")[-1]
        bad = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        outcome = "failed" if bad else "skipped" if skipped else "passed"
        yield (file, case.attrib["name"]), outcome


def collect(arguments: list[str]) -> list[Case]:
    """Return all cases that there are."""
    listing = subprocess.run(
        [*arguments, "--collect-only"],
        cwd=HERE,
        check=True,
        capture_output=True,
        text=True,
    )
    return re.findall(r"^tests/(?:\w+/)*(\w+)\.py::(.*)$", listing.stdout, re.MULTILINE)


def by_area(outcomes: dict[Case, str], cases: list[Case]) -> list[record.Row]:
    """Return a row of counts for each area."""
    rows = []
    for area, files in AREAS.items():
        found = Counter(x for (file, _), x in outcomes.items() if file in files)
        missing = sum(file in files for file, _ in cases) - found.total()
        row = {"area": area, **{x: found[x] for x in ("passed", "failed", "skipped")}}
        rows.append(row | {"not run": missing})
    return rows


def by_check(outcomes: dict[Case, str], cases: list[Case]) -> list[record.Row]:
    """Return for each check of every optimizer how many optimizers pass it."""
    passed, exist = {}, {}
    for (file, case), outcome in outcomes.items():
        if file == CONTRACT and outcome == "passed":
            check, optimizer = split(case)
            passed.setdefault(check, set()).add(optimizer)
    for file, case in cases:
        if file == CONTRACT:
            check, optimizer = split(case)
            exist.setdefault(check, set()).add(optimizer)
    return [
        {
            "check": check,
            "optimizers that pass": len(passed.get(check, ())),
            "of": len(optimizers),
        }
        for check, optimizers in exist.items()
        if len(optimizers) > 1
    ]


def split(case: str) -> tuple[str, str]:
    """Return the check in words, and the optimizer, with which its choices begin."""
    check, _, choices = case.partition("[")
    words = check.removeprefix("test_").replace("_", " ")
    return words, choices.rstrip("]").split("-")[0]


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--everything", action="store_true", help="slow checks, too")
    parser.add_argument("--junit", type=Path, help="count what this report has")
    record.add_option(parser)
    args = parser.parse_args()
    cases = collect(pytest_arguments(everything=True))
    if args.junit:
        outcomes = dict(outcomes_in(args.junit))
    else:
        outcomes = run(pytest_arguments(args.everything))
    tables = {
        "by area": by_area(outcomes, cases),
        "every optimizer, by check": by_check(outcomes, cases),
    }
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")
    record.finish(args.json, tables, record.cpu_in_words())


if __name__ == "__main__":
    main()
