"""Orbax, if one is installed that can save; otherwise importing this skips tests."""

import contextlib
import gc
import sys

import jax
import pytest

ocp = pytest.importorskip("orbax.checkpoint")
release = tuple(int(part) for part in ocp.__version__.split(".")[:3])

# pip installs 0.11.24 for JAX 0.5.3, as its metadata allow, but it needs a later JAX.
if release >= (0, 11, 24) and not hasattr(jax.monitoring, "record_scalar"):
    pytest.skip(
        "orbax-checkpoint of 0.11.24 or later saves nothing with this JAX: "
        "pip install 'orbax-checkpoint<0.11.24'",
        allow_module_level=True,
    )

restores_keys = release >= (0, 11, 24)


@contextlib.contextmanager
def event_loops_left_open():
    """Ignore event loops that Orbax before 0.11.24 does not close."""
    if release >= (0, 11, 24):
        yield
        return
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = hook
