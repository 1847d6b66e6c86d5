"""The benchmark for a GPU or a TPU runs anywhere, in small."""

import pytest
from benchmark_rows import tables_of

SCRIPT = "on_device.py"


@pytest.mark.slow
def test_everything_is_measured_or_said_to_be_left_out(tmp_path):
    tables = tables_of(SCRIPT, tmp_path, "--small")
    left_out = tables.pop("not run", [])
    reasons = ("torch", "flashoptim", "expected JAX 0.10 or later")
    assert all(any(x in row["why"] for x in reasons) for row in left_out)
    rows = {title.split()[0]: len(found) for title, found in tables.items()}
    assert rows["training"] == 5 and rows["time"] >= 13
    assert all(row.get("GB on the host", 1) > 0 for row in tables["host memory"])
    losses = [row["loss"] for row in tables["training"]]
    assert max(losses) - min(losses) < 0.01


@pytest.mark.slow
def test_what_comes_too_late_is_said_to_be_left_out(tmp_path):
    (left_out,) = tables_of(SCRIPT, tmp_path, "--small", "--seconds", "0").values()
    assert {row["why"] for row in left_out} == {"TimeoutError: 0 seconds were over"}
    assert len(left_out) > 20
