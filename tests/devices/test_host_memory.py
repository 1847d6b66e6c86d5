"""What `offload` keeps where, in steps compiled for a TPU that is not here.

With the extra `accelerators`, and JAX 0.10 or later.
"""

import functools

import jax
import pytest
from benchmark_rows import rows_of

pytest.importorskip("libtpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="before JAX 0.10"),
]


rows = functools.partial(rows_of, "host_memory.py")


@pytest.mark.parametrize("table", ["One", "Rows"])
def test_the_device_needs_two_chunks_and_an_update_and_the_host_no_copy(
    table, tmp_path
):
    found = rows(tmp_path, "--tables", table, "--rows", "masters,5")
    assert len(found) == (9 if table == "One" else 3)
    for row in found:
        state = 3.125 if row["step"].startswith("5.1") else 12
        assert row["state on the host"] == row["overwritten there"] == state, row
        assert row["device holds"] == pytest.approx(4, abs=0.01), row
        assert row["host temporaries, MiB"] == 0, row
        assert row["by take_step on the host, MiB"] == 0, row
        if row["step"] == "masters, clipped updates":  # it needs whole leaves
            continue
        assert row["by take_step, MiB"] <= 1.1 * 2 * 64, row
        # 163 of 160, 227 of 192 and 322 of 256 MiB are taken.
        most = 1.3 * row["two chunks and an update, MiB"]
        assert row["device temporaries, MiB"] <= most, row


def test_a_state_larger_than_the_device_compiles(tmp_path):
    (row,) = rows(tmp_path, "--tables", "Larger", "--rows", "masters")
    assert row["state on the host, GiB"] == 18
    assert row["device holds, GiB"] + row["temporaries, GiB"] < 6.5
    assert row["host temporaries, GiB"] == 0
    assert row["without `offload`"].startswith("out of memory")
