"""The text that the demo trains on."""

import importlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT_WINDOWS = 256


class Corpus(NamedTuple):
    """A text as ASCII codes.

    Attributes:
        train: all but the last tenth.
        held_out: windows of that tenth, one per row.
    """

    train: np.ndarray
    held_out: np.ndarray


def read_text(path: Path | None) -> str:
    """Return the text of a file, or else the help texts of Python itself.

    Raises:
        ValueError: if there is no such text, or it is not readable as UTF-8.
    """
    if path is None:
        try:
            topics = importlib.import_module("pydoc_data.topics").topics
        except ImportError as error:  # Some distributions leave it out.
            raise ValueError(
                "this Python comes without pydoc_data, whose help texts the demo "
                "trains on; give a text of your own with --text FILE."
            ) from error
        return "\n".join(topics[topic] for topic in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the text {path} cannot be read ({error}), expected a UTF-8 text file."
        ) from error


def make_corpus(text: str, context: int) -> Corpus:
    """Split a text, without its non-ASCII characters, for training and evaluation.

    Raises:
        ValueError: if the held-out tenth would not fill one window.
    """
    codes = np.frombuffer(text.encode("ascii", errors="ignore"), np.uint8)
    window = context + 1  # Every character except the first is predicted.
    if codes.size < 10 * window:
        raise ValueError(
            f"the text has {codes.size} ASCII characters, expected at least "
            f"{10 * window}, of which the last tenth is held out; give a longer text."
        )
    train, held_out = np.split(codes, [codes.size - codes.size // 10])
    window_count = min(HELD_OUT_WINDOWS, held_out.size // window)
    starts = np.linspace(0, held_out.size - window, window_count).astype(int)
    return Corpus(train, held_out[starts[:, None] + np.arange(window)])
