"""Loops of frameworks on eight devices: Linen, NNX, openpi's rule, explicit meshes."""

import jax
import pytest
from forced_devices import run_checks

pytest.importorskip("flax.nnx")
pytest.importorskip("equinox")
if not hasattr(jax, "set_mesh"):
    pytest.skip("needs jax.set_mesh", allow_module_level=True)
from loops_on_devices import CHECKS, DEVICES


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_loop(check):
    run_checks("loops_on_devices", DEVICES, [check])
