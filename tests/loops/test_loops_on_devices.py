"""Loops of frameworks on eight devices: Linen, NNX, openpi's rule, explicit meshes."""

import pytest
from forced_devices import run_checks
from loops_on_devices import CHECKS, DEVICES
from slow_cases import mostly_slow

OFTEN = ("", "FullCopy", "5.1_bytes")


def split(check):
    """Return the name of a check without its form, and whether it often runs."""
    name, _, form = check.__name__.rstrip("]").partition("[")
    return name, form in OFTEN


@mostly_slow(
    ("name", "often"), dict.fromkeys(map(split, CHECKS)), lambda _, often: often
)
def test_loop(name, often):
    if name.startswith("haliax"):
        pytest.importorskip("haliax")
    checks = [check for check in CHECKS if split(check) == (name, often)]
    run_checks("loops_on_devices", DEVICES, checks)
