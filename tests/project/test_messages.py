"""The page of errors and warnings is that of the code."""

import importlib.util
from pathlib import Path

import pytest

import optax_mp

PATH = Path(__file__).parents[2] / "docs" / "messages.py"
spec = importlib.util.spec_from_file_location("messages", PATH)
messages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(messages)


def test_the_page_of_messages_is_up_to_date():
    page = messages.PAGE.read_text(encoding="utf-8")
    assert page == messages.page(), "run `python docs/messages.py`"


def test_a_message_that_is_raised_is_on_the_page():
    with pytest.raises(ValueError) as raised:
        optax_mp.Split(bits=3)
    text = str(raised.value).removeprefix("Split: ")
    assert text.replace("got 3", "got ‹bits›") in messages.page()
