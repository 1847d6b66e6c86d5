"""The page of errors and warnings says what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

import optax_mp

PATH = Path(__file__).parents[2] / "docs" / "messages.py"
spec = importlib.util.spec_from_file_location("messages", PATH)
messages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(messages)


def test_the_page_has_a_section_for_every_function_that_raises():
    page = messages.page()
    headings = re.findall(r"^## `(\w+)`$", page, re.M)
    assert {"amp", "check_loss_scale", "mixed_precision", "zero1"} <= set(headings)
    assert len(re.findall(r"^- \*\*", page, re.M)) > 100
    shared = re.findall(r"^### (.+)$", page, re.M)
    assert set(shared) <= {*messages.HEADINGS.values(), messages.OTHER}


def test_every_folder_and_file_with_a_heading_is_there():
    found = {path.stem for path in messages.PACKAGE.rglob("*")}
    assert set(messages.HEADINGS) <= found


def test_a_message_that_is_raised_is_on_the_page():
    with pytest.raises(ValueError) as raised:
        optax_mp.Split(bits=3)
    text = str(raised.value).removeprefix("Split: ")
    assert text.replace("got 3", "got ‹bits›") in messages.page()
