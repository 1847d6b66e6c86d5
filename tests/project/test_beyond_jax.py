"""The list of what is read of JAX beyond its documented API, in `optax_mp.core.jax_api`."""

import re
from pathlib import Path

import optax_mp
from optax_mp.core import jax_api

ROOT = Path(optax_mp.__file__).parent
# The doors, and what a file does that reads jaxprs or settings without one.
READS = re.compile(
    r"\b_extend import|import _extend\b|\bexperimental\(\"|\btried\(|debug_info"
    r"|equation\.(?:params|ctx|source_info)|jax\.config\b(?!\.update)"
)
DOORS = {"core/jax_api/_extend.py", "core/jax_api/_experimental.py"}


def reads(text):
    return READS.search(text) is not None


def test_each_file_that_reads_more_than_the_public_api_is_listed():
    files = {p.relative_to(ROOT).as_posix(): p for p in ROOT.rglob("*.py")}
    found = {name for name, path in files.items() if reads(path.read_text("utf-8"))}
    listed = set(re.findall(r"`(\w+/[\w/]+\.py)`", jax_api.__doc__))
    assert listed - DOORS == found - DOORS


def test_no_file_reads_what_jax_keeps_private_or_the_text_of_a_program():
    for path in ROOT.rglob("*.py"):
        text = path.read_text("utf-8")
        for word in (r"\bjax\._src\b", r"\.as_text\(", r"\bjaxlib\b", r"\bmlir\.ir\b"):
            assert not re.search(word, text), (path, word)
