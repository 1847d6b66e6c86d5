"""`benchmarks/scale_plan.py`: its tables, and its numbers against compiled programs."""

import sys

import pytest
from forced_devices import run_checks
from planned_steps import CHECKS, planner


@pytest.mark.slow
def test_devices_hold_and_gather_what_is_planned():
    run_checks("planned_steps", 8, CHECKS)


def test_the_table_of_a_trillion_weights_takes_no_memory(capsys, monkeypatch):
    arguments = ["scale_plan.py", "--weights", "1T", "--devices", "8", "4096"]
    monkeypatch.setattr(sys, "argv", arguments)
    planner().main()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| ")
    ]
    found = {(form, layout): cells for form, layout, *cells in rows[1:]}
    weights = 128 * (12 * 25600**2 + 2 * 25600) + (2 * 256 + 1) * 25600
    copies = 2 * weights + 2 * weights + 12 * weights / 8
    sent = 7 / 8 * 4 * weights
    held = found["full copies", "zero1"][0]
    assert held == f"{copies / 1e9:,.0f}, {sent / 1e9:,.0f}"
    # Eight times fewer bytes at least where all is sharded over 512 times more devices.
    first, last = found["5.1 bytes", "fully sharded"]
    assert float(first.split(", ")[0]) / float(last.split(", ")[0]) == pytest.approx(
        512, rel=0.01
    )
