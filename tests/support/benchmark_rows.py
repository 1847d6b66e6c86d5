"""The rows that a benchmark script writes, for tests that hold them to limits."""

import json
import pathlib
import subprocess
import sys

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def tables_of(script, directory, *options):
    """Run a script of `benchmarks/` and return its tables by their titles."""
    found = directory / "found.json"
    command = [sys.executable, str(BENCHMARKS / script), *options, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(found.read_text(encoding="utf-8"))["tables"]


def rows_of(*arguments):
    """Return the rows of all tables."""
    return [row for table in tables_of(*arguments).values() for row in table]
