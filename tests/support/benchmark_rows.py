"""Benchmarks in tests: their modules, and the rows that they write."""

import json
import os
import pathlib
import subprocess
import sys

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
# The environment of a process in which XLA is not as `conftest.py` sets it for time.
AS_SHIPPED = {**os.environ, "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
FOLDERS = sorted({str(path.parent) for path in BENCHMARKS.glob("*/*.py")})


def tables_of(script, directory, *options):
    """Run a script of `benchmarks/` and return its tables by their titles."""
    found = directory / "found.json"
    name = script.removesuffix(".py")
    command = [sys.executable, str(BENCHMARKS), name, *options, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, env=AS_SHIPPED)
    assert done.returncode == 0, done.stderr
    return json.loads(found.read_text(encoding="utf-8"))["tables"]


def rows_of(*arguments):
    """Return the rows of all tables."""
    return [row for table in tables_of(*arguments).values() for row in table]
