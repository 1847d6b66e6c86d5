"""What steps compiled for a TPU and a GPU that are not here move and need.

With the extra `accelerators`, whose packages compile for both.
"""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow
BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "accelerators.py"


def rows(tmp_path, *options):
    found = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARK), *options, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = json.loads(found.read_text(encoding="utf-8"))["tables"]
    return [row for table in tables.values() for row in table]


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_a_step_moves_what_it_must(target, tmp_path):
    found = rows(
        tmp_path, "--tables", "AdamW,Other", "--forms", FORMS, "--target", target
    )
    assert len(found) == 12 + 4
    for row in found:
        name, limit = row["form"], row["limit"]
        known = [key for key in row if key.startswith("moved") and "not" not in key]
        for moved in known[-1:]:
            assert row[moved] <= 1.07 * limit, (name, moved, row)
            assert row[moved.replace("moved", "temporaries")] <= 0.05, (name, row)


# All but `apply_if_finite`, the links, which read gradients twice, and Muon.
FORMS = "float32,masters,loss scale,Split,8-bit,5.1,stochastic,Lion"


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_sharded_arrays_of_a_known_layout_are_not_gathered(target, tmp_path):
    for row in rows(tmp_path, "--tables", "AdamW sharded", "--target", target):
        # The sum of squares of a clipped step is one number.
        assert row["collectives, layout known"] == 0, row
