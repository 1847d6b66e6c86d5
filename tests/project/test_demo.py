"""The demo trains all forms that README names, and shows them."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "demo"


@pytest.fixture
def folder(monkeypatch):
    """Put the demo's folder on the path; its modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield FOLDER
    for name in ("demo", "model", "train"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_masters_learn_as_float32_does(folder):
    import model
    import train

    settings = model.Settings(steps=26, seeds=(0,), width=32, layer_count=1)
    corpus = model.read_corpus(settings.context)
    assert corpus[0].size > 600_000 and corpus[1].shape == (256, 65)
    first, _, masters, *_ = train.FORMS
    steps = []
    programs = [train.compile_form(x, settings, corpus) for x in (first, masters)]
    expected = train.train(programs[0], settings, corpus, steps.append)
    found = train.train(programs[1], settings, corpus)
    assert steps == [1, 24, 1]  # The first call makes one step.
    (curve,) = expected.curves
    assert expected.losses[0] < curve[0] - 1
    np.testing.assert_allclose(found.curves, expected.curves, atol=0.02)
    assert expected.bytes_per_weight == pytest.approx(12, abs=0.1)
    assert found.bytes_per_weight == pytest.approx(14, abs=0.1)


def test_forms_are_named_as_in_the_readme(folder):
    import train

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for form in train.FORMS:
        assert re.search(rf"^\| {form.name} \| .* \|$", readme, re.MULTILINE)


@pytest.mark.slow
def test_the_demo_prints_a_table_and_draws(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    import demo
    import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "2"])
    demo.main()
    shown = capsys.readouterr().out
    assert all(form.name in shown for form in train.FORMS)
    assert "Times are" in " ".join(shown.split())
    assert (tmp_path / "optax_mp_demo.png").read_bytes().startswith(b"\x89PNG")
