"""The core stands alone: masters and loss scales need no other part of the package."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import core_wall
import pytest

import optax_mp

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "optax_mp"
CORE_TESTS = ("tests/masters", "tests/scaling")
IMPORTS = ast.Import, ast.ImportFrom
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def imports_in(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield (file and line, module or name, whether in a function) of all imports."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = {
            x for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for x in ast.walk(f)
        }
        for node in ast.walk(tree):
            if isinstance(node, IMPORTS):
                # A relative import starts with dots.
                start = "." * getattr(node, "level", 0)
                module = getattr(node, "module", None)
                start += f"{module}." if module else ""
                for alias in node.names:
                    place = f"{path.relative_to(folder)}:{node.lineno}"
                    yield place, start + alias.name, node in inner


def ways_out(core: Path) -> list[str]:
    """Return the imports in a folder of what is of the package and not of its core.

    Also the package itself, of which all parts are attributes, and relative ones.
    """
    return [
        f"{place} {name}"
        for place, name, _ in imports_in(core)
        if name == "optax_mp" or name.startswith(".") or core_wall.is_beyond(name)
    ]


def test_no_import_goes_from_the_core_to_a_room():
    """Also not within a function, or for types alone."""
    assert ways_out(PACKAGE / "core") == []


def test_no_import_within_a_function():
    """What a module needs stands at its top."""
    assert [place for place, _, is_inner in imports_in(PACKAGE) if is_inner] == []


# What is wrong at the end of a file of the core.
FAULTS = {
    "at the top": "import optax_mp.compact",
    "in a function": "def step():\n    from optax_mp.compact import _codes",
    "for types": "if TYPE_CHECKING:\n    from optax_mp.compact import Quantized",
    "relative": "from ...compact import _codes",
    "a public name": "from optax_mp import amp",
    "all names": "import optax_mp as mp",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_import_of_a_room_is_found(fault, tmp_path):
    shutil.copytree(PACKAGE / "core" / "wrappers", tmp_path / "wrappers")
    assert ways_out(tmp_path) == []
    with (tmp_path / "wrappers" / "_choose.py").open("a") as file:
        file.write(FAULTS[fault])
    (found,) = ways_out(tmp_path)
    assert found.startswith("wrappers/_choose.py:")
    inner = [place for place, _, is_inner in imports_in(tmp_path) if is_inner]
    assert len(inner) == (fault == "in a function")


def test_tests_of_the_core_name_nothing_of_a_room():
    """So that a test that needs one is found before the slow run below."""
    beyond = {path.stem for path in PACKAGE.iterdir()} - {"core", "__init__"}
    for home, names in optax_mp._HOMES.items():
        beyond |= set() if home.startswith("core.") else set(names.split())
    for folder in CORE_TESTS:
        used = [(place, name) for place, name, _ in imports_in(REPOSITORY / folder)]
        for path in (REPOSITORY / folder).glob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            attributes = (x for x in nodes if isinstance(x, ast.Attribute))
            used += [(f"{path.name}:{x.lineno}", ast.unparse(x)) for x in attributes]
        pairs = [(place, name.split(".")) for place, name in used]
        found = [x for x in pairs if x[1][0] == "optax_mp" and beyond & set(x[1][1:2])]
        assert found == []


def behind_the_wall(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run pytest in a folder, in a process in which only the core can be imported."""
    paths = os.pathsep.join([str(REPOSITORY / "tests/support"), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "core_wall", *arguments]
    command += ["-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "body",
    [
        "import optax_mp.compact",
        "optax_mp.core.step()",
        "with pytest.raises(AssertionError): optax_mp.core.step()",
        "",
    ],
    ids=["at the top", "in a step", "caught", "not at all"],
)
def test_the_wall_stops_what_a_step_imports_and_tells_what_was_caught(body, tmp_path):
    """With a package that imports by a name that no reader of its text can see."""
    step = '__import__("optax_mp." + "compact")'
    for name, text in {"": "import optax_mp.core", "compact": ""}.items():
        (tmp_path / "optax_mp" / name).mkdir(exist_ok=True)
        (tmp_path / "optax_mp" / name / "__init__.py").write_text(text)
    (tmp_path / "optax_mp" / "core.py").write_text(f"def step(): {step}")
    (tmp_path / "test_step.py").write_text(
        f"import optax_mp, pytest\ndef test_step():\n    {body or 'pass'}\n"
    )
    run = behind_the_wall(tmp_path, "-c", os.devnull, "--rootdir", str(tmp_path))
    assert run.returncode == (1 if body else 0), run.stdout
    assert ("the core imports optax_mp.compact" in run.stdout) == bool(body)


@pytest.mark.slow
def test_masters_and_loss_scales_pass_their_tests_without_the_rooms():
    """In a process in which the import of any other part raises."""
    run = behind_the_wall(REPOSITORY, "-n", "0", "-m", "not slow", *CORE_TESTS)
    assert run.returncode == 0, run.stdout[-3000:]
