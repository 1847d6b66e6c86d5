"""The text that the demo trains on."""

import importlib.resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT_WINDOWS = 256
NOVEL = "pride_and_prejudice.txt.bz2"


class Corpus(NamedTuple):
    """A text as ASCII codes.

    Attributes:
        train: all but the last tenth.
        held_out: windows of that tenth, one per row.
    """

    train: np.ndarray
    held_out: np.ndarray


def read_text(path: Path | None) -> str:
    """Return the text of a file, or else the novel that comes with the package.

    Raises:
        ValueError: if there is no such text, or it is not readable as UTF-8.
    """
    if path is None:
        return read_novel()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the text {path} cannot be read ({error}), expected a UTF-8 text file."
        ) from error


def read_novel() -> str:
    """Return the text of Pride and Prejudice, which TEXT.md beside it tells of.

    Raises:
        ValueError: if this Python cannot decompress it.
    """
    try:
        bz2 = importlib.import_module("bz2")
    except ImportError as error:  # Some builds of Python leave it out.
        raise ValueError(
            "this Python comes without bz2, which decompresses the demo's text; give "
            "a text of your own with --text FILE."
        ) from error
    packed = importlib.resources.files("optax_mp._demo") / NOVEL
    return bz2.decompress(packed.read_bytes()).decode("ascii")


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
