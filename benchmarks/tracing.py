"""Time to trace an optimizer step of many leaves, as a ratio to plain optax.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --leaves 400 --json FILE

Before XLA compiles a step, JAX traces it in Python. Each form is traced in turn, in
every round anew, and the medians of the CPU time are compared. Leaves are matrices of
4096 elements, so that a compact form quantizes all of them.
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

ROUNDS = 9
SIDE = 64


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

    def tree(dtype: str) -> Any:
        leaf = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.dtype(dtype))
        return {f"layer{i}": {"kernel": leaf} for i in range(leaves)}

    params = tree(param_dtype)
    return tree(grad_dtype), jax.eval_shape(make().init, params), params


def tracer(form: str, leaves: int) -> Callable[[], Any]:
    """Return the function that traces one step of a form."""
    make, param_dtype, grad_dtype, _ = FORMS[form]
    args = arguments(make, param_dtype, grad_dtype, leaves)

    def trace() -> Any:
        # Made anew, because others look for the mark of a link as long as there is one.
        tx = make()

        # A new function each time, because JAX remembers what it has traced.
        def step(grads: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.make_jaxpr(step)(*args)

    return trace


def report(leaves: int) -> list[record.Row]:
    """Return a row for each form."""
    tracers = {form: tracer(form, leaves) for form in FORMS}
    counts = {form: len(trace().jaxpr.eqns) for form, trace in tracers.items()}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(ROUNDS):
        for form, trace in tracers.items():
            gc.collect()  # what others have left behind
            start = time.process_time()
            trace()
            times[form].append(1e3 * (time.process_time() - start))
    plain = statistics.median(times["plain optax"])
    return [
        {
            "form": form,
            "equations": counts[form],
            "ms": statistics.median(times[form]),
            "to plain optax": statistics.median(times[form]) / plain,
            "target": FORMS[form][3],
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
