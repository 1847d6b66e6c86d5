"""Runs optax's own test modules with `mixed_precision` around every optimizer.

A script for `test_optax_suite.py`: the tests log compilations, switch x64 on and warn
as optax's do, so they run in a process of their own, by `unittest`, which optax wrote
them for. What a test module calls `alias`, `contrib`, `optax` and so on becomes a copy
of that module with the optimizers wrapped; optax itself stays as it is, so that an
optimizer built from others is wrapped once, around the whole.
"""

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import re
import time
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib
from optimizers import OPTIMIZERS

import optax_mp

# optax annotates no return type for these, so the table may not know them.
_OPTIMIZERS = {*OPTIMIZERS, "dog", "dowg"}
# Modules whose tests look into the state of the optimizer.
_READ_STATE = ("_galore_test", "_mechanic_test", "_muon_test", "_schedule_free_test")

_built = 0


class _ReadThroughState(optax_mp.MixedPrecisionState):
    """A state that shows a test the inner state where it reads a field or an index."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner_state, name)

    def __getitem__(self, index: Any) -> Any:
        return self.inner_state[index]


def _with_readable_state(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    def init(params: Any) -> _ReadThroughState:
        state = optimizer.init(params)
        return _ReadThroughState(state.master_params, state.inner_state)

    def update(*args: Any, **kwargs: Any) -> tuple[Any, _ReadThroughState]:
        updates, state = optimizer.update(*args, **kwargs)
        return updates, _ReadThroughState(state.master_params, state.inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _wrapped(
    factory: Callable[..., Any], master_dtype: str, readable: bool
) -> Callable[..., Any]:
    """Return `factory` with masters around what it makes, and the same signature."""

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        global _built
        _built += 1
        optimizer = optax_mp.mixed_precision(factory(*args, **kwargs), master_dtype)
        return _with_readable_state(optimizer) if readable else optimizer

    return build


def _evaluated(eval_params: Callable[..., Any]) -> Callable[..., Any]:
    """Return `schedule_free_eval_params` for a state that is inside of ours."""

    @functools.wraps(eval_params)
    def evaluate(state: optax_mp.MixedPrecisionState, params: Any) -> Any:
        masters = optax_mp.master_params(state, params)
        return eval_params(state.inner_state, masters)

    return evaluate


def _copy_with_wrapped(
    module: types.ModuleType, wrap: Callable[..., Any]
) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    for name, value in vars(module).items():
        if name in _OPTIMIZERS and callable(value):
            value = wrap(value)
        elif name == "schedule_free_eval_params":
            value = _evaluated(value)
        elif value is optax.contrib:
            value = _copy_with_wrapped(value, wrap)
        setattr(copy, name, value)
    return copy


@contextlib.contextmanager
def _optimizers_wrapped(
    test_module: types.ModuleType, master_dtype: str
) -> Iterator[None]:
    wrap = functools.partial(
        _wrapped,
        master_dtype=master_dtype,
        readable=test_module.__name__.endswith(_READ_STATE),
    )
    own = dict(vars(test_module))
    for name, value in own.items():
        if inspect.ismodule(value) and not _OPTIMIZERS.isdisjoint(vars(value)):
            setattr(test_module, name, _copy_with_wrapped(value, wrap))
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


def _run_module(
    name: str, master_dtype: str, prefixes: tuple[str, ...], shard: int, shards: int
) -> dict[str, dict[str, Any]]:
    """Run every `shards`-th test of a module, and what fails also without masters."""
    global _built
    module = importlib.import_module(name)
    tests = [
        test
        for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module))
        if test.id().split(" ")[0].split(".")[-1].startswith(prefixes)
    ]
    results = {}
    for test in tests[shard::shards]:
        # Before each, since the tests of one module switch it off when they end.
        jax.config.update("jax_enable_x64", master_dtype == "float64")
        _built = 0
        start = time.monotonic()
        with _optimizers_wrapped(module, master_dtype):
            outcome = _run(test)
        results[_readable_id(test)] = {
            "outcome": outcome.name,
            "error": outcome.error[:500],
            "fails_unwrapped": False,
            "wrapped_optimizers": _built,
            "seconds": time.monotonic() - start,
        }
        if outcome.name == "failed":
            unwrapped = _run(test).name
            results[_readable_id(test)]["fails_unwrapped"] = unwrapped == "failed"
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--master-dtype", default="float32")
    parser.add_argument("--only", nargs="+", default=["test"], metavar="PREFIX")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.modules:
        results |= _run_module(
            name,
            arguments.master_dtype,
            tuple(arguments.only),
            arguments.shard,
            arguments.shards,
        )
    arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
