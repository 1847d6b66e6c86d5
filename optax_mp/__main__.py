"""`python -m optax_mp`: train a small transformer in several precisions."""

import argparse
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax

import optax_mp
from optax_mp._demo.picture import as_html
from optax_mp._demo.progress import expected_seconds, in_words, make_progress
from optax_mp._demo.report import as_json, as_table, verdict
from optax_mp._demo.runs import DEFAULT_DTYPES, DTYPES, STORAGES, Run, runs_of
from optax_mp._demo.settings import DEFAULTS, FULL_STEPS, Settings
from optax_mp._demo.text import Corpus, make_corpus, read_text
from optax_mp._demo.train import Result, train

DEFAULT_PICTURE = Path("optax_mp_demo.html")


def main(argv: Sequence[str] | None = None, defaults: Settings = DEFAULTS) -> int:
    """Run the demo with the arguments of a command line; return the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser(defaults)
    options = parser.parse_args(arguments)
    try:
        runs = runs_of(options.dtype, options.storage)
        seeds = tuple(dict.fromkeys(options.seeds))
        settings = replace(defaults, steps=options.steps, seeds=seeds)
        corpus = make_corpus(read_text(options.text), settings.context)
        check_picture(options.picture, options.text)
    except ValueError as error:
        parser.error(str(error))
    stream = sys.stderr if options.json else sys.stdout
    about = introduction(settings, corpus, runs)
    print(textwrap.fill(about, 79), file=stream, flush=True)
    all_steps = settings.steps * len(settings.seeds)
    report = make_progress(stream, all_steps, [run.name for run in runs])
    results: list[Result] = []
    try:
        for run in runs:
            results.append(train(run, settings, corpus, report))
    except KeyboardInterrupt:
        finished = f"\n{as_table(results)}" if results else ""
        print(f"\ninterrupted{finished}", file=stream)
        return 130
    if options.json:
        print(as_json(settings, results, environment(options.picture)))
    else:
        print(f"\n{as_table(results)}\n\n{textwrap.fill(verdict(results), 79)}")
    if options.picture is not None:
        command = shlex.join(["python", "-m", "optax_mp", *arguments])
        page = as_html(about, command, results)
        try:
            options.picture.write_text(page, encoding="utf-8")
        except OSError as error:
            print(f"the picture cannot be written: {error}", file=sys.stderr)
            return 1
        print(f"\nThe picture, for a browser: {options.picture.resolve()}", file=stream)
    return 0


def make_parser(defaults: Settings) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_mp",
        description="Train a small transformer on characters, from the same weights, "
        "on the same batches and with the same AdamW, in several precisions, and "
        "compare them with float32.",
    )
    add_run_options(parser, defaults)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the results and curves as JSON, and the progress to stderr",
    )
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        default=DEFAULT_PICTURE,
        help="where to write the HTML page with the charts (default: %(default)s)",
    )
    picture.add_argument(
        "--no-picture",
        dest="picture",
        action="store_const",
        const=None,
        help="write no page",
    )
    return parser


def add_run_options(parser: argparse.ArgumentParser, defaults: Settings) -> None:
    """Add the options that choose the runs and their settings."""
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="DTYPE",
        default=DEFAULT_DTYPES,
        help="dtypes of params: bf16, f16 (with a loss scale), e4m3fn, e5m2 (float8, "
        "with a model that computes in bfloat16); each also runs naively, in plain "
        f"optax (default: {' '.join(DEFAULT_DTYPES)})",
    )
    parser.add_argument(
        "--storage",
        nargs="+",
        choices=STORAGES,
        metavar="STORAGE",
        help="how masters are stored: full (float32, 14 bytes per weight with AdamW), "
        "split16 (12), split8 (11), compact (split8 and 8-bit moments, 5.1), "
        "stochastic (no masters, 10); float8 takes full only (default: full, and "
        "compact for bf16)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=int,
        default=defaults.steps,
        help="training steps of each run from each seed (default: %(default)s)",
    )
    length.add_argument(
        "--full",
        dest="steps",
        action="store_const",
        const=FULL_STEPS,
        help=f"{FULL_STEPS} steps: plain optax in bfloat16 falls further behind",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="SEED",
        default=defaults.seeds,
        help="seeds of weights and batches; each run trains from each "
        f"(default: {' '.join(map(str, defaults.seeds))})",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to train on (default: Pride and Prejudice, which comes along)",
    )


def check_picture(picture: Path | None, text: Path | None) -> None:
    """Check that the picture can be written, and leave no file behind.

    Raises:
        ValueError: if it cannot, or if it would overwrite the text.
    """
    if picture is None:
        return
    target = picture.resolve()  # So that a link itself is not removed.
    try:
        existed = target.exists()
        if existed and text is not None and target.samefile(text):
            raise ValueError(
                f"the picture would overwrite the text {text}; give another --picture."
            )
        with target.open("a"):
            pass
        if not existed:
            target.unlink()
    except OSError as error:
        raise ValueError(
            f"the picture {picture} cannot be written ({error}); give another place "
            "with --picture FILE, or --no-picture."
        ) from error


def introduction(settings: Settings, corpus: Corpus, runs: Sequence[Run]) -> str:
    """Return a sentence that says what the demo will do."""
    seeds = f", from {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else ""
    seconds = in_words(expected_seconds(settings, len(runs)))
    return (
        f"Training a {settings.layer_count}-layer transformer on "
        f"{corpus.train.size} characters on {device_name()}, {settings.steps} steps in "
        f"each of {len(runs)} ways{seeds}. Two idle CPU cores take about {seconds}."
    )


def device_name() -> str:
    """Return the backend of JAX, and which device it is if that says more."""
    backend, kind = jax.default_backend(), jax.devices()[0].device_kind
    return backend if kind == backend else f"{backend} ({kind})"


def environment(picture: Path | None) -> dict[str, Any]:
    """Return what the JSON says about the machine, the versions and the picture."""
    return {
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
            "optax_mp": optax_mp.__version__,
        },
        "picture": None if picture is None else str(picture.resolve()),
    }


if __name__ == "__main__":
    try:
        status = main()
    except BrokenPipeError:  # The reader has gone, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)
