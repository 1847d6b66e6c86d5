"""Time to trace and lower an optimizer step, as a ratio to plain optax.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --leaves 20 --json FILE

Before XLA compiles a step, JAX traces and lowers it in Python. All leaves have
different shapes, which is the worst case: they share no work. The forms take turns,
with empty caches, and the medians of the CPU time are compared. Leaves have 8192
elements or more, so that a compact form quantizes all of them.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

ROUNDS = 3


def adamw() -> optax.GradientTransformation:
    """Return what all forms have inside."""
    return optax.adamw(1e-3)


def masters(**settings: Any) -> optax.GradientTransformation:
    """Return AdamW with masters."""
    return optax_mp.mixed_precision(adamw(), **settings)


def compact() -> optax.GradientTransformation:
    """Return AdamW at 5.1 bytes per weight."""
    inner = optax_mp.low_bit_state(adamw())
    return optax_mp.mixed_precision(inner, storage=optax_mp.Split(bits=8))


def scaled() -> optax.GradientTransformation:
    """Return AdamW with masters, and a loss scale around."""
    return optax_mp.dynamic_loss_scale(masters())


def linked() -> optax.GradientTransformation:
    """Return AdamW with masters, and a loss scale in front of it, in a chain."""
    return optax.chain(optax_mp.dynamic_loss_scale(), masters())


# Form: (transformation, dtype of params, of gradients, times plain optax at most).
FORMS: dict[str, tuple[Callable[[], Any], str, str, float]] = {
    "plain optax": (adamw, "float32", "float32", 1.0),
    "masters": (masters, "bfloat16", "bfloat16", 2.0),
    "masters, float32 gradients": (masters, "bfloat16", "float32", 2.0),
    "loss scale": (scaled, "bfloat16", "bfloat16", 3.0),
    "loss scale, float32 gradients": (scaled, "bfloat16", "float32", 3.0),
    "loss scale in a chain": (linked, "bfloat16", "bfloat16", 3.0),
    "5.1 bytes": (compact, "bfloat16", "bfloat16", 8.0),
}


def arguments(
    make: Callable[[], Any], param_dtype: str, grad_dtype: str, leaves: int
) -> tuple[Any, Any, Any]:
    """Return the shapes of the gradients, the state and the params of a step."""
    shapes = [(64 + 8 * (i % 10), 128 * (1 + i // 10)) for i in range(leaves)]

    def tree(dtype: str) -> Any:
        return {
            f"layer{i}": {"kernel": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))}
            for i, shape in enumerate(shapes)
        }

    params = tree(param_dtype)
    return tree(grad_dtype), jax.eval_shape(make().init, params), params


def milliseconds(form: str, leaves: int) -> tuple[float, float]:
    """Return the CPU time to trace one step of a form, and to lower it."""
    make, param_dtype, grad_dtype, _ = FORMS[form]
    args = arguments(make, param_dtype, grad_dtype, leaves)
    tx = make()

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # What other forms have left behind.
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    traced: Any = jax.jit(step, donate_argnums=(1, 2)).trace(*args)
    middle = time.process_time()
    traced.lower()
    return 1e3 * (middle - start), 1e3 * (time.process_time() - middle)


def report(leaves: int) -> list[record.Row]:
    """Return a row for each form."""
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    for _ in range(ROUNDS):
        for form in FORMS:
            times[form].append(milliseconds(form, leaves))
    totals = {form: statistics.median(map(sum, found)) for form, found in times.items()}
    rows = []
    for form, found in times.items():
        trace, lower = map(statistics.median, zip(*found, strict=True))
        rows.append(
            {
                "form": form,
                "trace ms": trace,
                "lower ms": lower,
                "to plain optax": totals[form] / totals["plain optax"],
                "target": FORMS[form][3],
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
