"""Time to compile an optimizer step of many leaves, and memory that it needs.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --leaves 100 --json FILE

Each form is lowered and compiled in turn, in every round
anew, and the medians of the CPU time are compared with those of plain optax.
"temporaries" is memory beside params, state and gradients, in bytes per weight.
"""

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
import record
import tracing

import optax_mp

ROUNDS = 3


def split() -> optax.GradientTransformation:
    """Return AdamW with masters of which 16 bits are stored."""
    return tracing.masters(storage=optax_mp.Split(bits=16))


# Form: (transformation, dtype of params, of gradients, times plain optax at most).
FORMS: dict[str, tuple[Callable[[], Any], str, str, float]] = {
    "plain optax": (tracing.adamw, "float32", "float32", 1.0),
    "masters": (tracing.masters, "bfloat16", "bfloat16", 1.5),
    "masters, float32 gradients": (tracing.masters, "bfloat16", "float32", 1.5),
    "loss scale": (tracing.scaled, "bfloat16", "bfloat16", 1.5),
    "Split(16)": (split, "bfloat16", "bfloat16", 2.0),
    "5.1 bytes": (tracing.compact, "bfloat16", "bfloat16", 3.0),
}


def by_update(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    """Take a step as every optax loop does."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


WAYS = {"tx.update": by_update, "take_step": optax_mp.take_step}


def lower(form: str, way: str, leaves: int) -> Any:
    """Return a lowered step of a form, params and state donated."""
    make, param_dtype, grad_dtype, _ = FORMS[form]
    tx = make()
    grads, state, params = tracing.arguments(make, param_dtype, grad_dtype, leaves)

    # Each result takes the place of the donated array of its order.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, grads: Any) -> Any:
        return WAYS[way](tx, grads, state, params)

    return step.lower(params, state, grads)


def measure(form: str, way: str, leaves: int) -> tuple[float, float, float]:
    """Return the seconds to lower and to compile, and the temporaries per weight."""
    gc.collect()  # what others have left behind
    start = time.process_time()
    lowered = lower(form, way, leaves)
    middle = time.process_time()
    compiled = lowered.compile()
    end = time.process_time()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    weights = leaves * tracing.SIDE**2
    return middle - start, end - middle, temporaries / weights


def report(forms: list[str], leaves: int, rounds: int) -> list[record.Row]:
    """Return a row for each form and way; the first form is what ratios refer to."""
    runs: dict[Any, list[Any]] = {(form, way): [] for form in forms for way in WAYS}
    del runs[forms[0], "take_step"]
    for _ in range(rounds):
        for (form, way), found in runs.items():
            found.append(measure(form, way, leaves))
    medians = {
        key: [statistics.median(column) for column in zip(*found, strict=True)]
        for key, found in runs.items()
    }
    plain = medians[forms[0], "tx.update"]
    return [
        {
            "form": form,
            "by": way,
            "lower s": seconds[0],
            "compile s": seconds[1],
            "lower to plain optax": seconds[0] / plain[0],
            "compile to plain optax": seconds[1] / plain[1],
            "target": FORMS[form][3],
            "temporaries": seconds[2],
        }
        for (form, way), seconds in medians.items()
    ]


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="forms whose name holds this text")
    record.add_option(parser)
    args = parser.parse_args()
    first, *others = FORMS
    forms = [first, *(form for form in others if args.only in form)]
    rows = report(forms, args.leaves, args.rounds)
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    title = f"compiling an AdamW step of {args.leaves} leaves"
    record.finish(args.json, {title: rows}, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
