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
# Times that no record has: results from before times were kept, or none at all.
ABOUT = {
    "evidence": "20 s",
    "on_device": "up to 9 min",
    "training_step": "30 min each",
    "walk": "10 s",
    "where_it_runs": "30 min",
}
SCRIPTS = {path.stem: path for path in sorted(HERE.glob("*/*.py"))}


def first_line(path: Path) -> str:
    """Return what a script says that it does."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return text.partition("\n")[0]


def time_in_words(name: str) -> str:
    """Return how long the runs took whose results are kept."""
    import record

    seconds = [x.seconds for x in record.read_all().values() if x.script == name]
    known = sum(x for x in seconds if x)
    if not known:
        return ABOUT.get(name, "not recorded")
    return f"{known:.0f} s" if known < 100 else f"{known / 60:.0f} min"


def print_list() -> None:
    """Print a row for each script that runs, by its folder."""
    for name, path in SCRIPTS.items():
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
            where = f"{path.parent.name}/{name}"
            print(f"{where:28} {time_in_words(name):13} {first_line(path)}")


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
