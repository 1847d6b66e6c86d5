"""What the package shows: names, examples, imports, and a README that runs."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import optax_mp

ROOT = Path(__file__).parents[1]
# The blocks of docs/porting run in test_porting.py, which also looks at what they do.
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
PAGES += [ROOT / "docs" / "design" / "protocol.md"]
PAGES += sorted((ROOT / "docs" / "guide").glob("*.md"))
BLOCKS = [
    pytest.param(
        block,
        id=f"{page.stem}-{number}",
        # By default what one reads first.
        marks=pytest.mark.slow if page.parent.name == "guide" else (),
    )
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )
]
SOURCES = sorted((ROOT / "optax_mp").rglob("*.py"))


def test_a_withdrawn_name_says_what_to_write():
    step = r"tx.update\(grads, opt_state, params\)` and `params = optax.apply_updates"
    for name in ("take_step", "step_report"):
        with pytest.raises(AttributeError, match=f"{name}' any more; .*{step}"):
            getattr(optax_mp, name)
        assert name not in dir(optax_mp) and not hasattr(optax_mp, name)
    with pytest.raises(AttributeError, match="has no attribute 'amq'$"):
        optax_mp.amq  # noqa: B018


def test_private_parts_of_jax_are_used_nowhere():
    for source in SOURCES:
        assert "jax._src" not in source.read_text(encoding="utf-8"), source


@pytest.mark.parametrize(
    "word", ["jax.extend", "jax.core", "Tracer", "manual_axis_type", '"vma"']
)
def test_only_one_folder_knows_the_inside_of_jax(word):
    using = [x for x in SOURCES if re.search(word, x.read_text(encoding="utf-8"))]
    assert using and {x.parent.name for x in using} <= {"jax_api"}


def test_only_one_module_knows_jax_experimental():
    """It is a door, behind which modules are imported at their first use."""
    code = re.compile(r'^ *(import|from) jax\.experimental|"jax\.experimental\.', re.M)
    using = [x for x in SOURCES if code.search(x.read_text(encoding="utf-8"))]
    assert [x.name for x in using] == ["_experimental.py"]


THREADS = """
import random, sys, threading, optax_mp

sys.setswitchinterval(1e-6)

def use(i):
    names = random.Random(i).sample(optax_mp.__all__, len(optax_mp.__all__))
    for name in names:
        getattr(optax_mp, name)

threads = [threading.Thread(target=use, args=(i,)) for i in range(24)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_names_can_be_used_first_in_several_threads():
    """An error in a thread is printed, and a deadlock of imports is such an error."""
    run = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120
    )
    assert "Error" not in run.stderr and run.returncode == 0


MODULES = """
import sys, jax, optax, jax.numpy as jnp
before = set(sys.modules)
import optax_mp
"""
PLAIN_FORMS = """
params = {"w": jnp.ones((8, 64), jnp.bfloat16)}
masters = optax_mp.mixed_precision(optax.adam(1e-3))
tx = optax_mp.static_loss_scale(masters, 1.0)
state = tx.init(params)
jax.jit(tx.update).lower(params, state, params)
"""


def modules_after(program):
    """Return the modules that a program imports, but for those of JAX and optax."""
    program = f"{MODULES}{program}print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()


def test_a_program_pays_for_what_it_uses():
    assert modules_after("") == ["optax_mp"]
    found = modules_after(PLAIN_FORMS)
    own = {x.split(".")[1] for x in found if x.startswith("optax_mp.")}
    rooms = "autocast averages checkpoints compact devices release reports".split()
    assert own.isdisjoint(rooms)
    assert "jax.experimental.layout" not in found  # it is slow to import


def test_importing_starts_no_backend():
    # With an unknown platform, any use of a backend raises.
    environment = os.environ | {"JAX_PLATFORMS": "none"}
    code = "import optax_mp; optax_mp.mixed_precision(__import__('optax').adam(1e-3))"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_describing_a_step_starts_no_backend():
    """`jax.distributed.initialize` may come after it."""
    code = """
import jax, optax, optax_mp
inner = optax_mp.low_bit_state(optax.adam(1e-3))
tx = optax_mp.mixed_precision(inner, storage=optax_mp.Split(8))
params = {"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}
state = jax.eval_shape(tx.init, params)
jax.eval_shape(tx.update, params, state, params)
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_version_is_that_of_the_installed_package():
    assert importlib.metadata.version("optax_mp") == optax_mp.__version__


@pytest.mark.parametrize("block", BLOCKS)
def test_code_in_the_readme_and_the_docs_runs(block):
    packages = re.findall(
        r"^(?:import|from) (flax|haiku|orbax|safetensors)", block, re.M
    )
    for package in packages:
        pytest.importorskip(package)
    if "optax_mp.offload" in block and jax.__version_info__ < (0, 10):
        pytest.skip("before JAX 0.10")
    exec(compile(block, "README.md", "exec"), {})
