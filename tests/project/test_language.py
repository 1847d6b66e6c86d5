"""The long benchmark goes on where it was stopped, bit for bit."""

import importlib
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.support.benchmark_rows import FOLDERS


@pytest.mark.slow
def test_pieces_are_the_whole(monkeypatch, tmp_path):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    language = importlib.import_module("language")
    settings = replace(
        language.SETTINGS, steps=80, width=32, layer_count=1, head_count=2, context=16
    )
    compact = language.FORMS[-1:]
    text, held_out = language.read_library(settings.context, 4)

    class Stopped(Exception):
        pass

    def whole_or_pieces(folder, stops):
        run = language.Run(compact[0], settings, folder)
        for calls in stops:
            trained, count = run._train, 0

            def train(*args, calls=calls, trained=trained):
                nonlocal count
                count += 1
                if count > calls:
                    raise Stopped
                return trained(*args)

            run._train = train
            with pytest.raises(Stopped):
                run.advance(text, held_out, time.time() + 600)
            run = language.Run(compact[0], settings, folder)
        run.advance(text, held_out, time.time() + 600)
        return run

    whole = whole_or_pieces(tmp_path / "whole", [])
    pieces = whole_or_pieces(tmp_path / "pieces", [7, 30])
    assert (whole.row["stops"], pieces.row["stops"]) == (0, 2)
    assert whole.row["curve"] == pieces.row["curve"]
    jax.tree.map(np.testing.assert_array_equal, whole.trained, pieces.trained)
