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


def test_the_state_is_on_the_device_during_a_step_alone(tmp_path):
    found = rows(tmp_path, "--tables", "One", "--rows", "masters, c;compact, l")
    assert len(found) == 2
    for row, state in zip(found, (12, 3), strict=True):
        assert row["state on the host"] == row["overwritten there"], row
        # Bytes for each weight, beside counters and scales.
        assert row["state on the host"] == pytest.approx(state, abs=0.01), row
        assert row["device holds"] == pytest.approx(4, abs=0.01), row
        # One array of codes, which a TPU stores in other tiles than its host.
        assert row["host temporaries"] <= 0.25, row
