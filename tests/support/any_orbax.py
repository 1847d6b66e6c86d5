"""Orbax where there is one that can save; else whoever imports this is skipped."""

import contextlib
import gc
import sys

import jax
import pytest

ocp = pytest.importorskip("orbax.checkpoint")
release = tuple(int(part) for part in ocp.__version__.split(".")[:3])

# pip takes 0.11.24 for JAX 0.5.3, as its metadata allow, but it calls what came later.
if release >= (0, 11, 24) and not hasattr(jax.monitoring, "record_scalar"):
    pytest.skip(
        "orbax-checkpoint of 0.11.24 or later saves nothing with this JAX: "
        "pip install 'orbax-checkpoint<0.11.24'",
        allow_module_level=True,
    )

restores_keys = release >= (0, 11, 24)


@contextlib.contextmanager
def event_loops_left_open():
    """Drop them without a word: before 0.11.24 Orbax does not close its own."""
    if release >= (0, 11, 24):
        yield
        return
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = hook
