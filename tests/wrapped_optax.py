"""Runs optax's own test modules with `mixed_precision` around every optimizer.

A script for `test_optax_suite.py`: the tests log compilations, switch x64 on and warn
as optax's do, so they run in a process of their own, by `unittest`, which optax wrote
them for. What a test module calls `alias`, `contrib`, `optax` and so on becomes a copy
of that module with the optimizers wrapped; optax itself stays as it is, so that an
optimizer built from others is wrapped once, around the whole.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import inspect
import json
import re
import sys
import time
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optax
import optax.contrib
from optimizers import OPTIMIZERS

import optax_mp

_built: collections.Counter[str] = collections.Counter()


def _wrapped(name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return `factory` with masters around what it makes, and the same signature."""

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        _built[name] += 1
        return optax_mp.mixed_precision(factory(*args, **kwargs))

    return build


def _evaluated(eval_params: Callable[..., Any]) -> Callable[..., Any]:
    """Return `schedule_free_eval_params` for a state that is inside of ours."""

    @functools.wraps(eval_params)
    def evaluate(state: optax_mp.MixedPrecisionState, params: Any) -> Any:
        masters = optax_mp.master_params(state, params)
        return eval_params(state.inner_state, masters)

    return evaluate


def _is_source(value: Any) -> bool:
    """Whether `value` is a module of optax that has optimizers for a test to build."""
    if not inspect.ismodule(value) or value.__name__.split(".")[0] != "optax":
        return False
    return any(hasattr(value, name) for name in OPTIMIZERS)


def _copy_with_wrapped(module: types.ModuleType) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    for name, value in vars(module).items():
        if name in OPTIMIZERS:
            value = _wrapped(name, value)
        elif name == "schedule_free_eval_params":
            value = _evaluated(value)
        elif value is optax.contrib:
            value = _copy_with_wrapped(value)
        setattr(copy, name, value)
    return copy


@contextlib.contextmanager
def _optimizers_wrapped(test_module: types.ModuleType) -> Iterator[None]:
    own = {name: value for name, value in vars(test_module).items()}
    for name, value in own.items():
        if _is_source(value):
            setattr(test_module, name, _copy_with_wrapped(value))
    try:
        yield
    finally:
        vars(test_module).update(own)


class _Outcome(unittest.TestResult):
    """What became of one test; the failure of a part of it is a failure of it."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "passed"
        self.error = ""

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        if self.name == "passed":
            self.name = "skipped"

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._failed(err)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._failed(err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._failed(err)

    def _failed(self, err: Any) -> None:
        self.name = "failed"
        self.error = self.error or f"{err[0].__name__}: {err[1]}"


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _tests(test)
        else:
            yield test


def _readable_id(test: unittest.TestCase) -> str:
    """Return the id of a test without what differs from run to run."""
    name = re.sub(r"<function (\w+) at 0x\w+>", r"\1", test.id())
    name = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", name)
    return name.removeprefix("optax.").removeprefix("_src.")


def _run(test: unittest.TestCase) -> _Outcome:
    outcome = _Outcome()
    test.run(outcome)
    return outcome


def run_module(name: str, shard: int, shards: int) -> dict[str, dict[str, Any]]:
    """Run every `shards`-th test of a module; what fails, also without the wrapper."""
    module = importlib.import_module(name)
    found = unittest.defaultTestLoader.loadTestsFromModule(module)
    results = {}
    for test in list(_tests(found))[shard::shards]:
        _built.clear()
        start = time.monotonic()
        with _optimizers_wrapped(module):
            outcome = _run(test)
        seconds = time.monotonic() - start
        fails_unwrapped = outcome.name == "failed" and _run(test).name == "failed"
        results[_readable_id(test)] = {
            "outcome": outcome.name,
            "error": outcome.error[:500],
            "fails_unwrapped": fails_unwrapped,
            "wrapped_optimizers": _built.total(),
            "seconds": seconds,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.modules:
        results |= run_module(name, arguments.shard, arguments.shards)
    arguments.out.write_text(json.dumps(results))
    sys.exit(0)


if __name__ == "__main__":
    main()
