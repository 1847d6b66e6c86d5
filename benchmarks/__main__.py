"""Run a benchmark, or list them all.

    python benchmarks                          # a row for each: what it shows, how long
    python benchmarks optimizer_step --help
    python benchmarks optimizer_step --json FILE

The folders are the questions: `speed`, `memory`, `quality`, `peers`; `page` makes the
pages of evidence from the results. A script is called by its name, and finds the others
by theirs.
"""

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = {path.stem: path for path in sorted(HERE.glob("*/*.py"))}


def first_line(path: Path) -> str:
    """Return what a script says that it does."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return text.partition("\n")[0]


def print_list() -> None:
    """Print a row for each script that runs, by its folder."""
    import record

    times = record.run_times()
    for name, path in SCRIPTS.items():
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
            where = f"{path.parent.name}/{name}"
            print(f"{where:28} {times.get(name, 'not recorded'):13} {first_line(path)}")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), *{str(path.parent) for path in SCRIPTS.values()}]
    if len(sys.argv) == 1:
        print_list()
        sys.exit()
    script = SCRIPTS.get(sys.argv[1])
    if script is None:
        sys.exit(f"{sys.argv[1]} is not one of {', '.join(SCRIPTS)}")
    del sys.argv[1]
    runpy.run_path(str(script), run_name="__main__")
