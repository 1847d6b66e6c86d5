"""How many functions and modules one update goes through.

    python benchmarks walk    # a Markdown table; fails above a limit

AdamW for two leaves, traced once before. Calls and modules are this package's, in the
first row optax's. Comprehensions do not count: from Python 3.12 on they are no calls.
"""

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optimizer_forms as forms
import record

import optax_mp

_ROOTS = {
    "optax": str(Path(optax.__file__).parent),
    "optax_mp": str(Path(optax_mp.__file__).parent),
}
# A form: the most calls and modules.
LIMITS = {
    "float32": (41, 7),
    "masters": (100, 9),
    "loss scale": (300, 15),
    "compact": (250, 17),
}
_INLINED = "<listcomp>", "<setcomp>", "<dictcomp>"


def calls_of(step: Callable[[], Any]) -> collections.Counter[tuple[str, str]]:
    """Return how often `step` calls each function, as (module, function)."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        is_call = event == "call" and name not in _INLINED
        if is_call and file.startswith(tuple(_ROOTS.values())):
            counts[file, name] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts


def walk_of(name: str) -> collections.Counter[tuple[str, str]]:
    """Return the functions that one update of a form calls."""
    form = forms.FORMS[name]
    tx = form.make()
    params = {name: jnp.ones((64, 64), form.param_dtype) for name in ("a", "b")}
    state = tx.init(params)
    grads = jax.tree.map(lambda p: p.astype(form.grad_dtype), params)

    def trace() -> Any:
        return jax.make_jaxpr(lambda *args: tx.update(*args))(grads, state, params)

    trace()  # JAX's own caches are filled
    return calls_of(trace)


def table() -> list[record.Row]:
    """Return a row for each of the limits."""
    rows: list[record.Row] = []
    for form, (most_calls, most_modules) in LIMITS.items():
        counts = walk_of(form)
        root = _ROOTS["optax" if form == "float32" else "optax_mp"] + "/"
        own = {key: n for key, n in counts.items() if key[0].startswith(root)}
        rows.append(
            {
                "update of two leaves": form,
                "calls": sum(own.values()),
                "at most": most_calls,
                "modules": len({file for file, _ in own}),
                "at most ": most_modules,
            }
        )
    return rows


def main() -> None:
    """Print the table."""
    rows = table()
    print(record.as_markdown(rows))
    if any(x["calls"] > x["at most"] or x["modules"] > x["at most "] for x in rows):
        sys.exit("above a limit")


if __name__ == "__main__":
    main()
