"""Of which program results are: fingerprints of what they measured.

A fingerprint is a hash of the state that a form makes for a small model with boxes: the
path, dtype and shape of each array; and of the default arguments of its functions. A
result has a fingerprint for each form that its tables name. A test names the files of
an earlier program, with their commands.
"""

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

ADAMW = optax.adamw(1e-3)
# The form, the words of tables that mean it, its functions, and an optimizer.
FORMS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "masters": (
        "masters|FullCopy|mixed_precision|compact",
        "mixed_precision FullCopy",
        lambda mp: mp.mixed_precision(ADAMW),
    ),
    "Split": (
        "Split|compact",
        "mixed_precision Split",
        lambda mp: mp.mixed_precision(ADAMW, storage=mp.Split(8)),
    ),
    "low-bit state": (
        "8-bit (state|moments)|16-bit moments|compact|low_bit_state",
        "low_bit_state",
        lambda mp: mp.low_bit_state(ADAMW),
    ),
    "stochastic rounding": (
        "stochastic rounding",
        "stochastic_rounding",
        lambda mp: mp.stochastic_rounding(ADAMW),
    ),
    "loss scale": (
        "loss scale|^link|^f16|float16 with",
        "dynamic_loss_scale",
        lambda mp: mp.dynamic_loss_scale(ADAMW),
    ),
    "average": (
        "average",
        "with_average",
        lambda mp: mp.with_average(ADAMW, 0.999),
    ),
    "amp": ("^amp\\b", "amp", lambda mp: ADAMW),
    "release": ("release$", "release_gradients scan_layers", lambda mp: ADAMW),
    "offload": ("offload", "offload", lambda mp: ADAMW),
}


@jax.tree_util.register_dataclass
@dataclass
class Box:
    """A param as frameworks keep them."""

    value: Any


MODEL = {
    "embedding": Box(jax.ShapeDtypeStruct((1600, 64), jnp.bfloat16)),
    "layers": [Box(jax.ShapeDtypeStruct((3, 192, 96), jnp.bfloat16))],
    "norm": jax.ShapeDtypeStruct((96,), jnp.float32),
    "count": jax.ShapeDtypeStruct((), jnp.int32),
}


@functools.cache
def fingerprints(package: Any = optax_mp) -> dict[str, str]:
    """Return the fingerprints of all forms that the package has."""
    made = {}
    for name in FORMS:
        _, functions, make = FORMS[name]
        if all(hasattr(package, x) for x in functions.split()):
            state = jax.eval_shape(make(package).init, MODEL)
            facts = [
                f"{jax.tree_util.keystr(path)} {x.dtype.name} {x.shape}"
                for path, x in jax.tree_util.tree_leaves_with_path(state)
            ]
            for function in functions.split():
                parameters = inspect.signature(getattr(package, function)).parameters
                facts += [
                    f"{x.name} {in_words(x.default)}" for x in parameters.values()
                ]
            text = "\n".join(facts).encode()
            made[name] = hashlib.sha256(text).hexdigest()[:10]
    return made


def in_words(default: Any) -> str:
    """Return a default argument, the same with each version of JAX."""
    return getattr(default, "__name__", None) or repr(default)


def forms_in(tables: record.Tables) -> list[str]:
    """Return the forms that tables name, in a title, a column or a cell."""
    words = {*tables, *(key for rows in tables.values() for row in rows for key in row)}
    rows = [row for rows in tables.values() for row in rows]
    words |= {x for row in rows for x in row.values() if isinstance(x, str)}
    return [
        name
        for name, (pattern, *_) in FORMS.items()
        if any(re.search(pattern, word) for word in words)
    ]


def stale(records: Mapping[str, record.Record]) -> dict[str, str]:
    """Return the results of an earlier program, and in words how to renew each."""
    now, times, how = fingerprints(), record.run_times(), {}
    for name, found in records.items():
        before = found.fingerprints or {}
        names = dict.fromkeys([*before, *forms_in(found.tables)])
        forms = [x for x in names if before.get(x) != now.get(x)]
        if forms:
            time = times.get(found.script, "time not known")
            command = f"`{found.command} --json FILE`, {time}"
            how[name] = f"{', '.join(forms)} changed; {command}"
    return how
