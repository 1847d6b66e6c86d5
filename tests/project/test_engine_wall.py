"""The engine is behind a wall: one page of names, and no cost before it is needed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optax_mp import engine

PACKAGE = Path(engine.__file__).parents[1]
ROOMS = "masters scaling compact devices release reports autocast checkpoints".split()


def imports_of(path):
    """Return the modules and names that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.update((node.module, x.name) for x in node.names)
        elif isinstance(node, ast.Import):
            found.update((x.name, "") for x in node.names)
    return found


FILES = {
    str(x.relative_to(PACKAGE)): imports_of(x) for x in sorted(PACKAGE.rglob("*.py"))
}
INSIDE = {x: found for x, found in FILES.items() if x.startswith("engine/")}


def test_others_import_the_names_of_its_page():
    used = set()
    for file in FILES.keys() - INSIDE.keys():
        own = [x for x in FILES[file] if x[0].startswith("optax_mp.engine")]
        assert all(x[0] == "optax_mp.engine" for x in own), file
        assert ("optax_mp", "engine") not in FILES[file], file
        used.update(name for _, name in own)
    assert used == set(engine.__all__)
    assert len(used) <= 6


def test_it_imports_no_room():
    rooms = re.compile(rf"optax_mp\.({'|'.join(ROOMS)})\b")
    for file, found in INSIDE.items():
        assert not [module for module, _ in found if rooms.match(module)], file


def test_only_one_module_knows_jax_experimental():
    """It is a door, behind which modules are imported at their first use."""
    for file, found in FILES.items():
        assert not [x for x, _ in found if x.startswith("jax.experimental")], file
    texts = {x: (PACKAGE / x).read_text() for x in FILES}
    using = [x for x, text in texts.items() if '"jax.experimental.' in text]
    assert using == ["_jax/_experimental.py"]


START = """
import sys, jax, optax, jax.numpy as jnp
before = set(sys.modules)
import optax_mp
"""
STEP = """
params = {"w": jnp.ones((8, 64), jnp.bfloat16)}
def step(tx, way):
    state = tx.init(params)
    def update(grads, state, params):
        return optax_mp.take_step(tx, grads, state, params) if way else tx.update(
            grads, state, params)
    jax.jit(update).lower(params, state, params)
for way in (0, 1):
    masters = optax_mp.mixed_precision(optax.adam(1e-3))
    step(optax_mp.static_loss_scale(masters, 1.0), way)
    step(optax_mp.stochastic_rounding(optax.adam(1e-3)), way)
"""
CODES = """
low = optax_mp.low_bit_state(optax.adam(1e-3), min_size=1)
step(optax_mp.mixed_precision(low), 0)
"""


def modules_after(*lines):
    """Return the modules that a program imports, but for those of JAX and optax."""
    program = "\n".join((START, *lines, "print(*(set(sys.modules) - before))"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()


@pytest.fixture(scope="module")
def of_plain_forms():
    return modules_after(STEP)


def test_a_program_pays_for_what_it_uses(of_plain_forms):
    assert modules_after() == ["optax_mp"]
    own = {x.split(".")[1] for x in of_plain_forms if x.startswith("optax_mp.")}
    assert own.isdisjoint(["autocast", "checkpoints", "devices", "release", "reports"])


def test_plain_forms_import_none_of_it(of_plain_forms):
    slow = re.compile(r"optax_mp\.engine|jax\.experimental\.(layout|pallas|xla_meta)")
    assert not list(filter(slow.match, of_plain_forms))
    with_codes = modules_after(STEP, CODES)
    assert "optax_mp.engine" in with_codes
    assert "optax_mp.engine._tpu" not in with_codes
