"""The rows that a benchmark script writes, for tests that hold them to limits."""

import json
import pathlib
import subprocess
import sys

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def rows_of(script, directory, *options):
    """Run a script of `benchmarks/` and return the rows of all of its tables."""
    found = directory / "found.json"
    command = [sys.executable, str(BENCHMARKS / script), *options, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = json.loads(found.read_text(encoding="utf-8"))["tables"]
    return [row for table in tables.values() for row in table]
