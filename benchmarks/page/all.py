"""All results: which are of an earlier program, and how to make them anew.

    python benchmarks all                  # a row for each: of this program? how long?
    python benchmarks all --stale          # makes anew what is not, the cheapest first
    python benchmarks all --stale rates finetune    # only these

A result is made under `build/results`, and takes the place of the old one when it is
whole. After an interruption the same command goes on: results that are done are of
this program, and scripts that take long keep the rows that they have. What a benchmark
needs beside the package is in the dependency groups of `pyproject.toml`; one that fails
leaves its old result, and the others are made.
"""

import argparse
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import fingerprints
import record

BUILD = record.FOLDER.parent / "build" / "results"


def cheapest_first(records: dict[str, record.Record]) -> list[str]:
    """Return the names of results in the order of the time that each takes.

    A time that is not known is that of a run in pieces, which are for long runs.
    """
    return sorted(records, key=lambda name: records[name].seconds or math.inf)


def make(name: str, found: record.Record, path: Path) -> bool:
    """Make a result anew; return whether that was possible."""
    script, *options = shlex.split(found.command)[2:]
    new = BUILD / path.name
    BUILD.mkdir(parents=True, exist_ok=True)
    if not new.exists():
        shutil.copy(path, new)  # whose rows of this program are kept
    command = [sys.executable, str(record.FOLDER), script, *options]
    print(f"== {name}: {found.command}", flush=True)
    if subprocess.run([*command, "--json", str(new)]).returncode:
        print(f"== {name} is left as it was", flush=True)
        return False
    new.replace(path)
    return True


def main() -> None:
    """Print the table, or make what is stale anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stale", action="store_true", help="make these anew")
    parser.add_argument("names", nargs="*", help="of results; by default all")
    args = parser.parse_args()
    records, paths = record.read_all(), record.paths()
    if unknown := set(args.names) - set(records):
        parser.error(f"no results: {', '.join(sorted(unknown))}")
    stale = fingerprints.stale(records)
    chosen = cheapest_first({x: records[x] for x in args.names or records})
    if not args.stale:
        for name in chosen:
            why = stale.get(name, "of this program").partition(";")[0]
            seconds = records[name].seconds
            takes = record.in_time(seconds) if seconds else "not known"
            print(f"{name:24} {takes:>9}  {why}")
        return
    failed = [x for x in chosen if x in stale and not make(x, records[x], paths[x])]
    if failed:
        sys.exit(f"not made: {', '.join(failed)}")


if __name__ == "__main__":
    main()
