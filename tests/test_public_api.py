"""What the package shows: names, examples, imports, and a README that runs."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import optax_mp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SOURCES = sorted((ROOT / "optax_mp").rglob("*.py"))


def test_the_readme_lists_every_public_name():
    section = README.split("## Names")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, flags=re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)[`(]", cell)}
    assert listed == set(optax_mp.__all__)


@pytest.mark.parametrize(
    "name", [name for name in optax_mp.__all__ if callable(getattr(optax_mp, name))]
)
def test_every_public_name_has_a_docstring_and_functions_an_example(name):
    thing = getattr(optax_mp, name)
    assert thing.__doc__
    is_state = isinstance(thing, type) and issubclass(thing, tuple)
    assert is_state or ">>> " in thing.__doc__


def test_private_parts_of_jax_are_used_nowhere():
    for source in SOURCES:
        text = source.read_text()
        assert "jax._src" not in text, source
        assert "jax.extend" not in text or source.name == "_jaxpr.py", source


def test_importing_starts_no_backend():
    # With an unknown platform, any use of a backend raises.
    environment = os.environ | {"JAX_PLATFORMS": "none"}
    code = "import optax_mp; optax_mp.mixed_precision(__import__('optax').adam(1e-3))"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_version_is_that_of_the_installed_package():
    assert importlib.metadata.version("optax_mp") == optax_mp.__version__


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_code_in_the_readme_runs(block):
    exec(compile(block, "README.md", "exec"), {})
