"""Two real processes that train together."""

import json
import pathlib
import socket
import subprocess
import sys

import pytest
from two_processes import BAD_STEPS, STEPS

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "two_processes.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def reports():
    """Return what each of two processes says of each part."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in processes:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        found.append({each["part"]: each for each in map(json.loads, lines)})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", ["jit", "zero1"])
def test_an_inf_on_one_rank_makes_both_skip(reports, part):
    first, second = (each[part] for each in reports)
    assert first["held"] == second["held"]
    assert first["held"] == [step in BAD_STEPS for step in range(STEPS)]
    assert first["scales"] == second["scales"]
    # Halved at each bad step, doubled after six good ones in a row.
    assert first["scales"] == [1024.0] * 5 + [512.0] * 6 + [256.0] * 6 + [512.0] * 3
    assert first["skipped"] == second["skipped"] == len(BAD_STEPS)
    assert first["finite"] and second["finite"]
    # The first leaf, which is finite on one of the two.
    assert first["nonfinite_index"] == second["nonfinite_index"] == 0


@pytest.mark.slow
def test_zero1_over_two_processes_is_bit_equal_and_half_the_state(reports):
    plain, sharded = reports[0]["jit"], reports[0]["zero1"]
    assert plain["params"] == sharded["params"]
    for part in (plain, sharded):
        assert part["params"] == reports[1][part["part"]]["params"]
    # But for what is one number: the scale, its counters, and that of adam.
    assert 0.5 <= sharded["state_bytes"] / plain["state_bytes"] < 0.51
