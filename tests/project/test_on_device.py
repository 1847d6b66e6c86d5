"""The benchmark for a GPU or a TPU runs anywhere, in small."""

import json
import subprocess
import sys

import pytest
from benchmark_rows import BENCHMARKS


def tables_of(tmp_path, *options):
    found = tmp_path / "found.json"
    script = str(BENCHMARKS / "on_device.py")
    command = [sys.executable, script, "--small", "--json", str(found), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(found.read_text(encoding="utf-8"))["tables"]


@pytest.mark.slow
def test_everything_is_measured_or_said_to_be_left_out(tmp_path):
    tables = tables_of(tmp_path)
    left_out = tables.pop("not run", [])
    assert all("torch" in row["why"] or "flash" in row["why"] for row in left_out)
    assert len(tables) == 4 and all(len(rows) >= 3 for rows in tables.values())
    for row in tables["kernels against XLA, three steps"]:
        differing = [x for name, x in row.items() if name.endswith("differing")]
        assert differing and all(x.startswith("0 of ") for x in differing), row
    assert tables["host memory"][1]["GB on the host"] > 0
    losses = [row["loss"] for row in tables["training"]]
    assert max(losses) - min(losses) < 0.01


def test_what_comes_too_late_is_said_to_be_left_out(tmp_path):
    (left_out,) = tables_of(tmp_path, "--seconds", "0").values()
    assert {row["why"] for row in left_out} == {"TimeoutError: 0 seconds were over"}
    assert len(left_out) > 20
