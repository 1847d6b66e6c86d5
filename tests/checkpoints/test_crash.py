"""A training process that is killed ends with the bits of one that was not."""

import itertools
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
from comparison import as_bits
from crash_run import FINAL, SAVE_EVERY, is_bad
from host_memory import needs_memories

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "crash_run.py"
BETWEEN_KILLS = 3 * SAVE_EVERY
TAIL = 10 * SAVE_EVERY


class Life(NamedTuple):
    """What one process did, from its start to its end or its death."""

    resumed: int
    last_step: int
    exit_code: int


def live(directory, steps, kill_at=None):
    """Run the script once; `kill_at` says of each line it prints if to kill it now."""
    form = directory.parent.name
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", SCRIPT, directory, str(steps), form],
        stdout=subprocess.PIPE,
        text=True,
    )
    resumed = last_step = -1
    for line in process.stdout:
        if not line.endswith("\n"):
            break  # The kill cut it off.
        word, number = line.split()
        if word == "resumed":
            resumed = int(number)
        if word == "step":
            last_step = int(number)
        if kill_at is not None and kill_at(word, int(number)):
            process.kill()
            kill_at = None  # and read on what it had printed by then
    process.stdout.close()
    return Life(resumed, last_step, process.wait())


def at_a_moment(step, chance):
    """Kill a random time after a step."""

    def kill_at(word, number):
        if word != "step" or number < step:
            return False
        time.sleep(chance.uniform(0, 0.02))
        return True

    return kill_at


def within_a_save(step, checkpoints):
    """Kill while a checkpoint is being written."""

    def kill_at(word, number):
        if word != "saving" or number < step:
            return False
        give_up = time.monotonic() + 1
        while not unfinished(checkpoints) and time.monotonic() < give_up:
            time.sleep(0.0005)
        return True

    return kill_at


def unfinished(checkpoints):
    """Return the checkpoints that were begun; Orbax renames them when they are done."""
    return [path.name for path in checkpoints.glob("*tmp*")]


def killed_again_and_again(directory, steps, kills):
    """Run to the end in many lives; return them, and how many died in a save."""
    chance = random.Random(kills)
    checkpoints = directory / "checkpoints"
    lives, died_in_a_save = [], 0
    for i in range(kills):
        step = (i + 1) * BETWEEN_KILLS + chance.randrange(SAVE_EVERY)
        kill_at = (
            within_a_save(step, checkpoints) if i % 2 else at_a_moment(step, chance)
        )
        lives.append(live(directory, steps, kill_at))
        died_in_a_save += bool(unfinished(checkpoints))
    lives.append(live(directory, steps))
    return lives, died_in_a_save


def final(directory):
    (params, opt_state), random_state = pickle.loads((directory / FINAL).read_bytes())
    return params, opt_state, random_state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kills"),
    [
        ("masters", 6),
        pytest.param("offload", 2, marks=needs_memories),
    ],
)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, form, kills):
    steps = kills * BETWEEN_KILLS + TAIL
    killed, whole = tmp_path / form / "killed", tmp_path / form / "whole"
    for directory in (killed, whole):
        directory.mkdir(parents=True)
    assert live(whole, steps) == Life(0, steps, 0)
    lives, died_in_a_save = killed_again_and_again(killed, steps, kills)

    assert [life.exit_code for life in lives] == [-signal.SIGKILL] * kills + [0]
    assert lives[0].resumed == 0
    for before, after in itertools.pairwise(lives):
        assert 0 < after.resumed <= before.last_step
        # One save may be in the queue and one under way, and were not finished.
        assert after.resumed > before.last_step - 3 * SAVE_EVERY
    assert died_in_a_save > 0 or kills < 6

    params, opt_state, random_state = final(killed)
    wanted_params, wanted_state, wanted_random = final(whole)
    assert as_bits(params) == as_bits(wanted_params)
    assert as_bits(opt_state) == as_bits(wanted_state)
    assert random_state == wanted_random
    skipped = sum(map(is_bad, range(steps)))
    assert int(opt_state.total_skipped_count) == skipped > 0
    counts = {int(part.count) for part in opt_state.inner_state.inner_state if part}
    assert counts == {steps - skipped}
