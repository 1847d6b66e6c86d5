"""How many functions and modules one traced update goes through.

    python benchmarks walk             # a Markdown table
    python benchmarks walk --calls masters   # each function of one row, by calls

AdamW for two leaves, traced once before. Calls of functions of optax and of this
package count, but not of JAX. Modules are this package's, in the first row optax's.
"""

import argparse
import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forms
import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

_ROOTS = {
    "optax": str(Path(optax.__file__).parent),
    "optax_mp": str(Path(optax_mp.__file__).parent),
}
# Form: the most calls and modules that it may take.
LIMITS: dict[str, tuple[int, int]] = {
    "float32": (41, 7),
    "masters": (180, 12),
    "loss scale": (380, 16),
}


def calls_of(step: Callable[[], Any]) -> collections.Counter[tuple[str, str]]:
    """Return how often `step` calls each function, as (module, function)."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(tuple(_ROOTS.values())):
            counts[file, frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts


def walk_of(form: str) -> collections.Counter[tuple[str, str]]:
    """Return the functions that one traced update of a form calls."""
    make, param_dtype, grad_dtype, _ = forms.FORMS[form]
    tx = make()
    params = {name: jnp.ones((64, 64), param_dtype) for name in ("a", "b")}
    state = tx.init(params)
    grads = jax.tree.map(lambda p: p.astype(grad_dtype), params)

    def trace() -> Any:
        return jax.make_jaxpr(lambda *args: tx.update(*args))(grads, state, params)

    trace()  # JAX's own caches are filled
    return calls_of(trace)


def main() -> None:
    """Read the options and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", choices=list(forms.FORMS), help="list one form")
    args = parser.parse_args()
    if args.calls:
        for (file, name), count in walk_of(args.calls).most_common():
            print(f"{count:5} {file.rpartition('optax')[2]}:{name}")
        return
    rows = []
    for form, (most_calls, most_modules) in LIMITS.items():
        counts = walk_of(form)
        own = "optax" if form == "float32" else "optax_mp"
        modules = {file for file, _ in counts if file.startswith(_ROOTS[own] + "/")}
        rows.append(
            {
                "update of two leaves": form,
                "calls": counts.total(),
                "at most": most_calls,
                "modules": len(modules),
                "at most ": most_modules,
            }
        )
    print(record.as_markdown(rows))


if __name__ == "__main__":
    main()
