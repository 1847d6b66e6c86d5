"""What `offload` keeps where, in steps compiled for a TPU that is not here.

With the extra `accelerators`, and JAX 0.10 or later.
"""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

pytest.importorskip("libtpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(jax, "memory"), reason="before JAX 0.10"),
]
BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "host_memory.py"


def rows(tmp_path, *options):
    found = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARK), *options, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = json.loads(found.read_text(encoding="utf-8"))["tables"]
    return [row for table in tables.values() for row in table]


@pytest.mark.parametrize("table", ["One", "Rows"])
def test_the_device_needs_two_chunks_and_an_update_and_the_host_no_copy(
    table, tmp_path
):
    found = {r["step"]: r for r in rows(tmp_path, "--tables", table, "--rows", "ma,5")}
    for name in ("masters", "masters, clipped gradients", "5.1 bytes"):
        row, state = found[name], 3.125 if name == "5.1 bytes" else 12
        assert row["state on the host"] == row["overwritten there"] == state, row
        assert row["device holds"] == pytest.approx(4, abs=0.01), row
        if name != "5.1 bytes":  # libtpu 0.0.42 copies its codes, one leaf at a time
            assert row["host temporaries, MiB"] == 0, row
            most = row["two chunks and an update, MiB"]
            assert row["device temporaries, MiB"] <= most, row


def test_a_state_larger_than_the_device_compiles(tmp_path):
    (row,) = rows(tmp_path, "--tables", "Larger", "--rows", "masters")
    assert row["state on the host, GiB"] == 18
    assert row["device holds, GiB"] + row["temporaries, GiB"] < 6.5
    assert row["host temporaries, GiB"] == 0
    assert row["without `offload`"].startswith("out of memory")
