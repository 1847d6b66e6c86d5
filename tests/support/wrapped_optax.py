"""Runs optax's own test modules with `mixed_precision` around every optimizer.

A script for `test_optax_suite.py`: the tests log compilations, switch x64 on and warn
as optax's do, so they run in a process of their own, by `unittest`, which optax wrote
them for. What a test module calls `alias`, `contrib`, `optax` and so on becomes a copy
of that module with the optimizers wrapped; optax itself stays as it is, so that an
optimizer built from others is wrapped once, around the whole.
"""

import contextlib
import functools
import importlib
import inspect
import json
import re
import sys
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

OPTIMIZER_NAMES = set(OPTIMIZERS)
# Their tests are of parts of optimizers.
PARTS_TESTED = ("_privacy_test", "_reduce_on_plateau_test")
# In float32 the params of all other tests are their own masters, which is plain optax.
IN_16_BITS = (
    "test_state_shape_dtype_shard_stability",
    "test_gradient_accumulation",
    "test_preserve_dtype",
    "test_explicit_dtype",
    "test_mu_dtype",
)
# Modules whose tests look into the state of the optimizer.
_READ_STATE = ("_galore_test", "_mechanic_test", "_muon_test", "_schedule_free_test")

# The optimizers that a test built, and which of them held a master in their state.
_built: set[str] = set()
_with_masters: set[str] = set()


class _ReadThroughState(optax_mp.MixedPrecisionState):
    """A state that shows a test the inner state where it reads a field or an index."""

    __slots__ = ()
    storage = optax_mp.FullCopy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner_state, name)

    def __getitem__(self, index: Any) -> Any:
        return self.inner_state[index]


def _wrapped(
    name: str, factory: Callable[..., Any], readable: bool
) -> Callable[..., Any]:
    """Return `factory` with masters around what it makes, and the same signature."""

    def show(state: optax_mp.MixedPrecisionState) -> optax_mp.MixedPrecisionState:
        return _ReadThroughState(*tuple(state)) if readable else state

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        optimizer = optax_mp.mixed_precision(factory(*args, **kwargs))
        _built.add(name)

        def init(params: Any) -> optax_mp.MixedPrecisionState:
            state = optimizer.init(params)
            if jax.tree.leaves(state.master_params):
                _with_masters.add(name)
            return show(state)

        def update(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(*args, **kwargs)
            return updates, show(state)

        return optax.GradientTransformationExtraArgs(init, update)

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
        if name in OPTIMIZER_NAMES and callable(value):
            value = wrap(name, value)
        elif name == "schedule_free_eval_params":
            value = _evaluated(value)
        elif value is optax.contrib:
            value = _copy_with_wrapped(value, wrap)
        setattr(copy, name, value)
    return copy


@contextlib.contextmanager
def _optimizers_wrapped(test_module: types.ModuleType) -> Iterator[None]:
    wrap = functools.partial(
        _wrapped,
        readable=test_module.__name__.endswith(_READ_STATE),
    )
    own = dict(vars(test_module))
    for name, value in own.items():
        if inspect.ismodule(value) and not OPTIMIZER_NAMES.isdisjoint(vars(value)):
            setattr(test_module, name, _copy_with_wrapped(value, wrap))
    try:
        yield
    finally:
        vars(test_module).update(own)


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _tests(test)
        else:
            yield test


def _readable_id(test: unittest.TestCase) -> str:
    """Return the id of a test: no addresses, and no index where arguments say which."""
    name = re.sub(r"<function ([\w.<>]+) at 0x\w+>", r"\1", test.id())
    name = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", name)
    name = re.sub(r"^(\S*?)\d+ \(", r"\1 (", name)
    return name.removeprefix("optax.").removeprefix("_src.")


def _run(test: unittest.TestCase) -> tuple[str, str]:
    """Return what became of a test, and why it failed."""
    # Before each test, since those of one module switch it off when they end.
    jax.config.update("jax_enable_x64", False)
    result = unittest.TestResult()
    test.run(result)
    if failures := result.errors + result.failures:
        return "failed", failures[0][1][-500:]
    return "skipped" if result.skipped else "passed", ""


def _run_module(name: str) -> dict[str, dict[str, Any]]:
    """Run tests of a module, and what fails also without masters."""
    module = importlib.import_module(name)
    results = {}
    for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if not test.id().split(" ")[0].split(".")[-1].startswith(IN_16_BITS):
            continue
        _built.clear()
        _with_masters.clear()
        with _optimizers_wrapped(module):
            outcome, why = _run(test)
        built, with_masters = sorted(_built), sorted(_with_masters)
        fails_unwrapped = outcome == "failed" and _run(test)[0] == "failed"
        test_id = _readable_id(test)
        if test_id in results:
            raise ValueError(f"two tests of {name} are called {test_id}")
        results[test_id] = {
            "outcome": "fails anyhow" if fails_unwrapped else outcome,
            "error": why,
            "built": built,
            "with_masters": with_masters,
        }
    return results


def main() -> None:
    """Write what became of the tests to a file."""
    folder = Path(optax.contrib.__file__).parent
    names = sorted(path.stem for path in folder.glob("*_test.py"))
    modules = [f"optax.contrib.{name}" for name in names if name not in PARTS_TESTED]
    results = {}
    for name in ("optax._src.alias_test", *modules):
        results |= _run_module(name)
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
