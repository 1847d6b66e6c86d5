"""A plugin of pytest that forbids all of the package but its core: `-p core_wall`.

An import of anything else raises. A run in which one was tried fails, also if a test or
the package caught the error.
"""

import sys

import pytest

tried: list[str] = []


def is_beyond(name: str) -> bool:
    """Return whether a module is of the package and not of its core."""
    package, _, rest = name.partition(".")
    return package == "optax_mp" and rest.partition(".")[0] not in ("", "core")


class Wall:
    """A finder of modules, asked before all others."""

    def find_spec(self, name, path=None, target=None):
        if is_beyond(name):
            tried.append(name)
            raise AssertionError(f"the core imports {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    assert not any(map(is_beyond, sys.modules))
    sys.meta_path.insert(0, Wall())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if tried:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for name in dict.fromkeys(tried):
        terminalreporter.write_line(f"the core imports {name}")
