"""Flax, as the tests of loops use it."""

import pytest


def recent_nnx():
    """Return `flax.nnx`; skip the module that asks without a Flax that loops run with.

    For JAX 0.8 there is none: `nnx.as_pure` is newer than Flax 0.12.0.
    """
    nnx = pytest.importorskip("flax.nnx")
    if not hasattr(nnx, "as_pure"):
        pytest.skip("needs `flax.nnx.as_pure`", allow_module_level=True)
    return nnx
