"""The guide's table is that of its script, and says of no form of ours that it fails."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "where_it_runs.py"


def test_the_page_has_the_scripts_rows():
    spec = importlib.util.spec_from_file_location("where_it_runs", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    lines = page.partition(script.START)[2].partition(script.END)[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert rows[0] == ["loop", *script.FORMS]
    assert [row[0] for row in rows[1:]] == list(script.ROWS)
    assert {cell for row in rows[1:] for cell in row[2:]} == {"runs"}
