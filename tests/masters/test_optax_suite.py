"""optax's own tests, with `mixed_precision` around every optimizer that they build."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import optax.contrib
import pytest
import wrapped_optax
from optax._src import alias

import optax_mp

pytestmark = pytest.mark.slow

PROCESSES = 2
TIMEOUT_SECONDS = 1800


@dataclasses.dataclass(frozen=True)
class Suite:
    """One run of some of optax's test modules.

    Attributes:
        modules: the test modules.
        source: the module of optax whose optimizers they test.
        at_least_found: a bound on the number of tests.
        at_least_passed: a bound on the number of those that pass.
        at_least_with_masters: a bound on the number of those of them with a leaf that
            has a master and is not its own.
        fail: the ids of the tests that pass in plain optax only, each with the reason.
        never_with_masters: the optimizers of `source` that no test gives such a leaf.
    """

    modules: list[str]
    source: ModuleType
    at_least_found: int
    at_least_passed: int
    at_least_with_masters: int
    fail: dict[str, str] = dataclasses.field(default_factory=dict)
    never_with_masters: frozenset[str] = frozenset()


# Their tests are of parts of optimizers.
PARTS_TESTED = ("_privacy_test", "_reduce_on_plateau_test")
CONTRIB_TESTS = [
    f"optax.contrib.{path.stem}"
    for path in sorted(Path(optax.contrib.__file__).parent.glob("*_test.py"))
    if path.stem not in PARTS_TESTED
]
STATE_IS_WIDE = "expects bfloat16 state for bfloat16 params; ours is that of masters"
# In float32 the params of all other tests are their own masters, which is plain optax.
IN_16_BITS = (
    "test_state_shape_dtype_shard_stability",
    "test_gradient_accumulation",
    "test_preserve_dtype",
    "test_explicit_dtype",
    "test_mu_dtype",
)
EXPLICIT_DTYPE = "test_explicit_dtype (params_dtype='bfloat16', state_dtype=None"

SUITES = {
    "alias": Suite(
        modules=["optax._src.alias_test"],
        source=alias,
        at_least_found=390,
        at_least_passed=340,
        at_least_with_masters=140,
        fail={
            f"alias_test.AliasTest.{EXPLICIT_DTYPE}, opt_name='{name}')": STATE_IS_WIDE
            for name in ("adam", "adamw", "sgd_mom")
        },
    ),
    "contrib": Suite(
        modules=CONTRIB_TESTS,
        source=optax.contrib,
        at_least_found=200,
        at_least_passed=190,
        at_least_with_masters=120,
        fail={
            "contrib._galore_test.GaLoreTest."
            "test_mu_dtype_controls_moment_dtype": STATE_IS_WIDE,
            f"contrib._schedule_free_test.ScheduleFreeTest.{EXPLICIT_DTYPE})": (
                STATE_IS_WIDE
            ),
        },
        never_with_masters=frozenset({"dpsgd", "sam", "split_real_and_imaginary"}),
    ),
}


def run(suite: Suite, folder: Path) -> dict[str, dict[str, Any]]:
    """Run `suite` in processes that share it, and return what became of each test."""
    command = [sys.executable, wrapped_optax.__file__, *suite.modules]
    command += ["--only", *IN_16_BITS]
    package = str(Path(optax_mp.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    shards = []
    try:
        for i in range(PROCESSES):
            with (folder / f"log{i}").open("w") as log:
                shard = ["--shard", f"{i}/{PROCESSES}", "--out", f"results{i}"]
                process = subprocess.Popen(
                    command + shard,
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            shards.append(process)
        codes = [process.wait(TIMEOUT_SECONDS) for process in shards]
    finally:
        for process in shards:
            process.kill()
            process.wait()
    results: dict[str, dict[str, Any]] = {}
    for i, code in enumerate(codes):
        assert code == 0, (folder / f"log{i}").read_text()[-5000:]
        results |= json.loads((folder / f"results{i}").read_text())
    return results


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES.keys())
def test_optax_passes_its_tests_with_masters(suite, tmp_path):
    results = run(suite, tmp_path)

    fail = {
        test: result["error"]
        for test, result in results.items()
        if result["outcome"] == "failed" and not result["fails_unwrapped"]
    }
    unexpected = "\n".join(
        f"{test}: {error}" for test, error in fail.items() if test not in suite.fail
    )
    assert not unexpected, f"pass in plain optax, and fail with masters:\n{unexpected}"
    assert not suite.fail.keys() - fail.keys(), "listed to fail, and do not"

    assert len(results) >= suite.at_least_found
    passed = {t: r for t, r in results.items() if r["outcome"] == "passed"}
    assert len(passed) >= suite.at_least_passed

    with_masters = [r["with_masters"] for r in passed.values() if r["with_masters"]]
    assert len(with_masters) >= suite.at_least_with_masters
    of_source = {n for n in wrapped_optax.OPTIMIZER_NAMES if hasattr(suite.source, n)}
    assert of_source.difference(*with_masters) == suite.never_with_masters

    assert not [test for test, result in passed.items() if not result["built"]]
