"""What is released: reference pages, metadata, and what a distribution holds."""

import doctest
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import optax_mp

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.rst"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def citation_field(name):
    """Return a field of the top level, which the file keeps on a line of its own."""
    (value,) = re.findall(rf"^{name}: (.+)$", CITATION, flags=re.MULTILINE)
    return value.strip("\"'")


REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
# Classes of reports and states have their folder before the name.
DOCUMENTED = re.findall(
    r"^\.\. (?:autofunction|autoclass|autoexception|py:data):: (?:optax_mp\.)?([\w.]+)$",
    REFERENCE,
    flags=re.MULTILINE,
)


def documented(name):
    folder, _, name = name.rpartition(".")
    return getattr(importlib.import_module(f"optax_mp.{folder}".rstrip(".")), name)


def test_the_reference_has_every_public_name_once():
    names = {name for name in DOCUMENTED if "." not in name}
    assert names == set(optax_mp.__all__)
    assert len(set(DOCUMENTED)) == len(DOCUMENTED)


@pytest.mark.parametrize("folder", ["averages", "compact", "reports"])
def test_the_reference_has_every_name_of_a_folder(folder):
    module = importlib.import_module(f"optax_mp.{folder}")
    known = {name.rpartition(".")[2] for name in DOCUMENTED}
    assert set(module.__all__) <= known


def test_the_reference_shows_every_public_name_at_a_glance():
    page = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*) \|", page, flags=re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)[`(]", cell)}
    assert listed == set(optax_mp.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_in_the_reference_run(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_every_public_name_has_an_example():
    for name in DOCUMENTED:
        # A mapping has no docstring of its own; its example is in the reference.
        if callable(documented(name)):
            text = inspect.getdoc(documented(name))
        else:
            text = REFERENCE.split(f".. py:data:: {name}\n")[1].split("\n.. ")[0]
        assert "\n    >>> " in text or "\n   >>> " in text, name


def test_every_public_field_is_described():
    for name in DOCUMENTED:
        thing = documented(name)
        fields = getattr(thing, "_fields", ())
        fields += tuple(getattr(thing, "__dataclass_fields__", ()))
        text = inspect.getdoc(thing) or ""
        described = re.findall(r"^    (\w+): ", text, re.MULTILINE)
        public = {field for field in fields if not field.startswith("_")}
        assert public <= set(described), name


def test_the_citation_is_of_this_version():
    assert citation_field("version") == optax_mp.__version__
    assert citation_field("license") == PROJECT["project"]["license"]


@pytest.mark.parametrize("page", ["CONTRIBUTING", "RELEASING"])
def test_what_a_page_for_developers_points_at_exists(page):
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    paths = re.findall(r"`(\.?\w+(?:/[\w.]+)+)`", text)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def supported_pythons():
    prefix = "Programming Language :: Python :: 3."
    classifiers = PROJECT["project"]["classifiers"]
    return [f"3.{c.removeprefix(prefix)}" for c in classifiers if c.startswith(prefix)]


def oldest(name):
    (found,) = [d for d in PROJECT["project"]["dependencies"] if d.startswith(name)]
    return found.partition(">=")[2]


def test_the_workflow_tests_what_the_metadata_promises():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    listed = ", ".join(f'"{version}"' for version in supported_pythons())
    assert f"python: [{listed}]" in workflow
    assert f'"jax=={oldest("jax>")} jaxlib=={oldest("jaxlib")}"' in workflow
    assert "- run: .ci/run\n" in workflow
    ends = f"{supported_pythons()[0]} to {supported_pythons()[-1]}"
    page = (ROOT / "docs" / "guide" / "stability.md").read_text(encoding="utf-8")
    assert f"| Python | {ends} |" in page and f"| JAX | {oldest('jax>')} to " in page


def test_actions_are_pinned_by_their_commit():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: (.+)", path.read_text(encoding="utf-8")):
            pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
            assert re.fullmatch(pinned, used), (path.name, used)


@pytest.fixture
def release(tmp_path):
    """Return the function that checks a copy of the project, edited, for a tag."""
    for name in (".ci/release_check", "pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "optax_mp").mkdir()
    (tmp_path / "optax_mp" / "__init__.py").write_text(
        '__version__ = "1.2.3"\n', encoding="utf-8"
    )

    def check(tag="v1.2.3", **edits):
        for name, (pattern, text) in edits.items():
            (path,) = tmp_path.glob(f"{name}.*")
            found = re.sub(
                pattern, text, path.read_text(encoding="utf-8"), count=9, flags=re.M
            )
            path.write_text(found, encoding="utf-8")
        command = [sys.executable, tmp_path / ".ci" / "release_check", tag]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout

    return check


def test_a_release_is_refused_until_all_is_there(release):
    code, said = release("v1.2.4", CITATION=("^date-released: .*\n", ""))
    assert code == 1
    for part in ("the tag is v1.2.4", "Repository of [project.urls]", "date-released"):
        assert part in said
    assert "CITATION.cff: expected `version: 1.2.3`" in said and "CHANGELOG.md" in said
    code, said = release(
        pyproject=(r"fill-this-in\.invalid", "a.host"),
        CITATION=("^version: .*", "version: 1.2.3\ndate-released: 2026-11-30"),
        CHANGELOG=("^# Changelog", "# Changelog\n\n## 1.2.3 (2026-11-30)"),
    )
    assert (code, said) == (0, "1.2.3 is ready\n")


def test_the_readme_for_an_index_has_no_relative_links():
    address, tag = "https://a.host/owner/optax_mp", "v1"
    command = [sys.executable, ROOT / ".ci" / "index_readme", address, tag]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    targets = re.findall(r"\]\(([^)]+)\)", done.stdout)
    assert targets and all(re.match(r"https?://|#", target) for target in targets)
    for target in targets:
        if target.startswith(address):
            kind, _, path = target.removeprefix(address + "/").split("/", 2)
            assert (ROOT / path.partition("#")[0]).exists(), target
            is_image = path.endswith((".png", ".svg"))
            assert kind == ("raw" if is_image else "blob"), target
