"""Loops of frameworks on eight devices: Linen, NNX, openpi's rule, explicit meshes."""

import jax
import pytest
from forced_devices import run_checks

pytest.importorskip("flax.nnx")
pytest.importorskip("equinox")
if not hasattr(jax, "set_mesh"):
    pytest.skip("needs jax.set_mesh", allow_module_level=True)
from loops_on_devices import CHECKS, DEVICES


def without_form(check):
    return check.__name__.split("[")[0]


@pytest.mark.parametrize("name", dict.fromkeys(map(without_form, CHECKS)))
def test_loop(name):
    checks = [check for check in CHECKS if without_form(check) == name]
    run_checks("loops_on_devices", DEVICES, checks)
