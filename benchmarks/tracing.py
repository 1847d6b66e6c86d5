"""Time to trace an optimizer step of many leaves, as a ratio to plain optax.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --leaves 400 --json FILE

Before XLA compiles a step, JAX traces it in Python. Each form is traced in turn, in
every round anew, and the medians are compared. Leaves are matrices of 4096 elements, so
that a compact form quantizes all of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

ROUNDS = 9


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


# Form: (transformation, dtype of params, times plain optax at most).
FORMS: dict[str, tuple[Callable[[], Any], str, float]] = {
    "plain optax": (adamw, "float32", 1.0),
    "masters": (masters, "bfloat16", 2.0),
    "loss scale around masters": (
        lambda: optax_mp.dynamic_loss_scale(masters()),
        "bfloat16",
        3.0,
    ),
    "5.1 bytes": (compact, "bfloat16", 8.0),
}


def tracer(form: str, leaves: int) -> Callable[[], Any]:
    """Return the function that traces one step of a form."""
    make, dtype, _ = FORMS[form]
    tx, leaf = make(), jax.ShapeDtypeStruct((64, 64), jnp.dtype(dtype))
    params = {f"layer{i}": {"kernel": leaf} for i in range(leaves)}
    state = jax.eval_shape(tx.init, params)

    def trace() -> Any:
        # A new function each time, because JAX remembers what it has traced.
        def step(grads: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.make_jaxpr(step)(params, state, params)

    return trace


def report(leaves: int) -> list[record.Row]:
    """Return a row for each form."""
    tracers = {form: tracer(form, leaves) for form in FORMS}
    counts = {form: len(trace().jaxpr.eqns) for form, trace in tracers.items()}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(ROUNDS):
        for form, trace in tracers.items():
            start = time.perf_counter()
            trace()
            times[form].append(1e3 * (time.perf_counter() - start))
    plain = statistics.median(times["plain optax"])
    return [
        {
            "form": form,
            "equations": counts[form],
            "ms": statistics.median(times[form]),
            "to plain optax": statistics.median(times[form]) / plain,
            "target": FORMS[form][2],
        }
        for form in FORMS
    ]


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=100)
    record.add_option(parser)
    args = parser.parse_args()
    rows = report(args.leaves)
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    title = f"tracing an AdamW step of {args.leaves} leaves"
    record.finish(args.json, {title: rows}, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
