"""The guide's table is that of its script, and says of no form of ours that it fails."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "peers" / "where_it_runs.py"


def test_the_page_has_the_scripts_rows():
    spec = importlib.util.spec_from_file_location("where_it_runs", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    lines = page.partition(script.START)[2].partition(script.END)[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert rows[0] == ["trainer", *script.FORMS]
    titles = [title for _, _, title in script.TRAINERS.values()]
    assert len(rows) > 1
    for row in rows[1:]:
        assert any(row[0].startswith(title) for title in titles)
        assert len(row) == 4 and all("; " in cell for cell in row[1:])
        # Kauldron's own resumed run differs in float32 as well.
        assert "differs" in row[1] or "differs" not in row[2] + row[3]
