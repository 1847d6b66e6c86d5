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

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "crash_run.py"
# After a step, and while a checkpoint is being written.
KILLS = ["step", "saving"] * 2
BETWEEN_KILLS = 3 * SAVE_EVERY
STEPS = (len(KILLS) + 3) * BETWEEN_KILLS


class Life(NamedTuple):
    """What one process did, from its start to its end or its death."""

    resumed: int
    last_step: int
    exit_code: int


def unfinished(directory):
    """Return the checkpoints that were begun; Orbax renames them when they are done."""
    return [path.name for path in (directory / "checkpoints").glob("*tmp*")]


def live(directory, kill_at="", least=0, pause=0.0):
    """Run the script, and kill it when it prints a word with a number of at least this."""
    command = [sys.executable, "-W", "ignore", SCRIPT, directory, str(STEPS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    seen = {"resumed": -1, "step": -1}
    for line in process.stdout:
        if not line.endswith("\n"):
            break  # The kill cut it off.
        word, number = line.split()
        seen[word] = int(number)
        if word == kill_at and int(number) >= least:
            time.sleep(pause)
            give_up = time.monotonic() + (word == "saving")
            while not unfinished(directory) and time.monotonic() < give_up:
                time.sleep(0.0005)
            process.kill()
            kill_at = ""  # and read on what it had printed by then
    process.stdout.close()
    return Life(seen["resumed"], seen["step"], process.wait())


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    assert live(whole) == Life(0, STEPS, 0)
    chance, lives, died_in_a_save = random.Random(6), [], 0
    for i, word in enumerate(KILLS, 1):
        least = i * BETWEEN_KILLS + chance.randrange(SAVE_EVERY)
        pause = chance.uniform(0, 0.02) if word == "step" else 0
        lives.append(live(killed, word, least, pause))
        died_in_a_save += bool(unfinished(killed))
    lives.append(live(killed))

    exit_codes = [life.exit_code for life in lives]
    assert exit_codes == [-signal.SIGKILL] * len(KILLS) + [0]
    assert lives[0].resumed == 0 and died_in_a_save
    for before, after in itertools.pairwise(lives):
        assert 0 < after.resumed <= before.last_step
        # One save may be in the queue and one under way, and were not finished.
        assert after.resumed > before.last_step - 3 * SAVE_EVERY

    run, wanted = (pickle.loads((x / FINAL).read_bytes()) for x in (killed, whole))
    assert as_bits(run) == as_bits(wanted)
    skipped = sum(map(is_bad, range(STEPS)))
    assert int(run[1].total_skipped_count) == skipped > 0
    counts = {int(part.count) for part in run[1].inner_state.inner_state if part}
    assert counts == {STEPS - skipped}
