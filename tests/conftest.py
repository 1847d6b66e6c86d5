"""Shared pieces of the suite."""

import gc
import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest

import optax_mp
from optax_mp.core.wrappers import _choose

# It needs frameworks, and `--doctest-modules` imports every file.
collect_ignore = ["support/random_cases.py"] * (not importlib.util.find_spec("flax"))

# So that tests on many devices are tests like others, without a process of their own.
jax.config.update("jax_num_cpu_devices", 8)

# XLA's work on programs that run once is most of the time of a run. `XLA_FLAGS=`, also an
# empty one, leaves it as it is: so CI runs the claims of bits.
if "XLA_FLAGS" not in os.environ:
    emitters = jax.__version_info__ < (0, 11)  # later JAX has no other way
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false" if emitters else ""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
# Slow tests of these rooms compare two programs bit by bit, whose products and sums XLA
# then joins in one of them.
EXACT_ROOMS = {"masters", "release"}

# What is imported is not to be looked through at every collection of garbage.
gc.freeze()


def pytest_configure(config):
    """Keep compiled programs: most of the time of a first run is that of XLA.

    Processes started by a test use the same folder. `--cache-clear` empties it.
    """
    # Before JAX 0.10 what is kept is not always what was compiled: optax.lbfgs is not.
    # And `-p no:cacheprovider` asks for nothing to be kept.
    if jax.__version_info__ < (0, 10) or not hasattr(config, "cache"):
        return
    settings = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_collection_modifyitems(items):
    """Leave what compares bits to runs with XLA as it ships."""
    if not jax.config.read("jax_disable_most_optimizations"):
        return
    skip = pytest.mark.skip(reason="needs XLA as it ships: set XLA_FLAGS= (to nothing)")
    for item in items:
        if item.path.parent.name in EXACT_ROOMS and item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """Forget compiled programs after each module: thousands slow all others down."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def without_earlier_tests():
    """Let no test look for a mark because of an earlier one."""
    yield
    _choose._a_link_ran.clear()


@pytest.fixture
def after_a_link():
    """Run a link of a chain, as another program of this process may have done."""
    link = optax_mp.static_loss_scale()
    link.update(jnp.ones(1), link.init(jnp.ones(1)))


@pytest.fixture
def no_long_constant_folding(capfd):
    """Fail where XLA says that it computes for long what the program should compute."""
    yield
    assert "Constant folding" not in capfd.readouterr().err


@pytest.fixture
def x64():
    """Run a test with 64-bit types on."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
