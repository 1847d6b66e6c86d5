"""Time to trace and lower an optimizer step, as a ratio to plain optax.

    python benchmarks tracing
    python benchmarks tracing --leaves 20 --json FILE

Before XLA compiles a step, JAX traces and lowers it in Python. All leaves have
different shapes, which is the worst case: they share no work. The forms take turns,
with empty caches, and the medians of the CPU time are compared. Leaves have 8192
elements or more, so that a compact form quantizes all of them.
"""

import argparse
import gc
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import record
from forms import FORMS, by_optax

ROUNDS = 3


# Title: its name in `forms`, and times plain optax at most.
TARGETS = {
    "plain optax": ("float32", 1.0),
    "masters": ("masters", 2.0),
    "masters, float32 gradients": ("masters, float32 gradients", 2.0),
    "loss scale": ("loss scale", 3.0),
    "loss scale, float32 gradients": ("loss scale, float32 gradients", 3.0),
    "loss scale in a chain": ("link", 3.0),
    "5.1 bytes": ("5.1 bytes", 8.0),
}


def tree(dtype: str, leaves: int) -> Any:
    """Return the shapes of params or gradients."""
    shapes = [(64 + 8 * (i % 10), 128 * (1 + i // 10)) for i in range(leaves)]
    return {
        f"layer{i}": {"kernel": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))}
        for i, shape in enumerate(shapes)
    }


def milliseconds(title: str, leaves: int) -> tuple[float, float]:
    """Return the CPU time to trace one step of a form, and to lower it."""
    make, param_dtype, grad_dtype, _ = FORMS[TARGETS[title][0]]
    tx, params = make(), tree(param_dtype, leaves)
    args = params, jax.eval_shape(tx.init, params), tree(grad_dtype, leaves)
    # What other forms have left behind.
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    traced: Any = jax.jit(by_optax(tx), donate_argnums=(0, 1)).trace(*args)
    middle = time.process_time()
    traced.lower()
    return 1e3 * (middle - start), 1e3 * (time.process_time() - middle)


def report(leaves: int) -> list[record.Row]:
    """Return a row for each form."""
    times: dict[str, list[tuple[float, float]]] = {title: [] for title in TARGETS}
    for _ in range(ROUNDS):
        for title, found in times.items():
            found.append(milliseconds(title, leaves))
    totals = {name: statistics.median(map(sum, found)) for name, found in times.items()}
    rows = []
    for title, found in times.items():
        trace, lower = map(statistics.median, zip(*found, strict=True))
        rows.append(
            {
                "form": title,
                "trace ms": trace,
                "lower ms": lower,
                "to plain optax": totals[title] / totals["plain optax"],
                "target": TARGETS[title][1],
            }
        )
    return rows


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=100)
    record.add_option(parser)
    args = parser.parse_args()
    rows = report(args.leaves)
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    title = f"tracing and lowering AdamW's step, {args.leaves} different leaves"
    record.finish(args.json, {title: rows}, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
