"""optax's own tests, with `mixed_precision` around every optimizer that they build."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wrapped_optax
from optimizers import OPTIMIZERS

import optax_mp

EXPLICIT_DTYPE = "test_explicit_dtype (params_dtype='bfloat16', state_dtype=None"
# They expect bfloat16 state for bfloat16 params; ours has the dtype of masters.
STATE_IS_WIDE = {
    *(
        f"alias_test.AliasTest.{EXPLICIT_DTYPE}, opt_name='{name}')"
        for name in ("adam", "adamw", "sgd_mom")
    ),
    "contrib._galore_test.GaLoreTest.test_mu_dtype_controls_moment_dtype",
    f"contrib._schedule_free_test.ScheduleFreeTest.{EXPLICIT_DTYPE})",
}
# No test gives these a leaf that has a master and is not its own.
NEVER_WITH_MASTERS = {"dpsgd", "sam", "split_real_and_imaginary"}


@pytest.mark.slow
def test_optax_passes_its_tests_with_masters(tmp_path):
    found = tmp_path / "results.json"
    package = str(Path(optax_mp.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, wrapped_optax.__file__, str(found)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    results = json.loads(found.read_text())

    failed = {t: r["error"] for t, r in results.items() if r["outcome"] == "failed"}
    assert failed.keys() == STATE_IS_WIDE, failed
    assert len(results) >= 590
    passed = {t: r for t, r in results.items() if r["outcome"] == "passed"}
    assert len(passed) >= 530
    assert not [test for test, result in passed.items() if not result["built"]]
    with_masters = [r["with_masters"] for r in passed.values() if r["with_masters"]]
    assert len(with_masters) >= 260
    assert OPTIMIZERS.keys() - set().union(*with_masters) == NEVER_WITH_MASTERS
