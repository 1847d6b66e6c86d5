"""Of which program results are: fingerprints of what they measured.

A fingerprint is a hash of the text of a lowered program (StableHLO): of the step of a
form on a small model, of a function under amp, of a released loss. Names and locations
are left out, so that a refactoring that keeps the programs keeps the results. A result
has a fingerprint for each form that its tables name and each platform that it is about.
Lowered texts differ between versions of JAX, so only those of one version are compared.

    python benchmarks fingerprints    # prints them
"""

import functools
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from jax.sharding import AxisType

import optax_mp

# The words of tables, commands and machines that mean a platform.
PLATFORMS = {
    "cpu": r"CPU cores",
    "cuda": r"H100|h100|A100|GPU|gpu",
    "tpu": r"TPU|tpu|\bv5e|\bv5p|\bv6e",
}


@jax.tree_util.register_dataclass
@dataclass
class Box:
    """A param as frameworks keep them."""

    value: Any


BF16 = jnp.bfloat16
MODEL = {
    "embedding": Box(jax.ShapeDtypeStruct((1600, 64), BF16)),
    "layers": [Box(jax.ShapeDtypeStruct((3, 192, 96), BF16))],
    "head": Box(jax.ShapeDtypeStruct((128, 2048), BF16)),
    "norm": jax.ShapeDtypeStruct((96,), jnp.float32),
    "attention": jax.ShapeDtypeStruct((2, 16, 320), BF16),
}
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

# A function and descriptions of its arguments.
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def steps(tx: optax.GradientTransformation, model: Any = MODEL) -> Iterator[Program]:
    """Yield `init`, and the step after gradients as the params and in float32."""
    yield tx.init, (model,)
    state = jax.eval_shape(tx.init, model)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for dtype in (None, jnp.float32):
        grads = jax.tree.map(
            lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype),
            model,
        )
        yield step, (model, state, grads)


def in_dtype(dtype: Any) -> Any:
    """Return the model in another dtype."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), MODEL)


def split(bits: int) -> Iterator[Program]:
    """Yield steps of AdamW with split masters, also in float16, and a derivative."""
    tx = masters(storage=optax_mp.Split(bits))
    yield from steps(tx)
    yield from steps(tx, in_dtype(jnp.float16))

    def after(rate: jax.Array, params: Any, state: Any) -> jax.Array:
        grads = jax.tree.map(lambda x: rate * jnp.ones(x.shape), params)
        updates, _ = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(new))

    state = jax.eval_shape(tx.init, MODEL)
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    yield jax.grad(after), (rate, MODEL, state)


def scaled() -> Iterator[Program]:
    """Yield steps of float16 params with masters behind a loss scale."""
    tx, model = optax_mp.dynamic_loss_scale(masters()), in_dtype(jnp.float16)
    yield from steps(tx, model)

    def step(params: Any, state: Any, grads: Any, loss: jax.Array) -> Any:
        return tx.update(grads, state, params, value=loss)

    state = jax.eval_shape(tx.init, model)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    yield step, (model, state, in_dtype(jnp.float32), loss)


def low_bit() -> Iterator[Program]:
    """Yield the steps of AdamW with moments in codes: those of float32 params."""
    for bits in (8, 16):
        yield from steps(
            optax_mp.low_bit_state(ADAMW, bits=bits), in_dtype(jnp.float32)
        )


def masters(**settings: Any) -> optax.GradientTransformation:
    """Return AdamW with masters."""
    return optax_mp.mixed_precision(ADAMW, **settings)


def zero1() -> optax.GradientTransformation:
    """Return AdamW with masters, cut over the devices of a mesh."""
    axis = (AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis, devices=jax.devices()[:1])
    return optax_mp.zero1(masters(), mesh, "data")


def block(carry: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    """Return a layer's output: sums, a norm, an exponential, and products."""
    x = carry / (1e-6 + jnp.sqrt(jnp.mean(carry**2, -1, keepdims=True)))
    weights = jax.nn.softmax(x @ layer["w"])
    return carry + jnp.tanh(weights @ layer["w"]), None


LAYERS = {"w": jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)}
X = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def under_amp() -> Iterator[Program]:
    """Yield a loss under amp, and its gradient."""

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.scan(jax.checkpoint(block), x, layers)[0]
        return jnp.log(jnp.sum(jnp.exp(y))) - jnp.mean(y)

    for dtype in (BF16, jnp.float16):
        low = optax_mp.amp(loss, compute_dtype=dtype)
        yield low, (LAYERS, X)
        yield jax.value_and_grad(low), (LAYERS, X)


def released() -> Iterator[Program]:
    """Yield a step of layers in the backward pass, in one pass and in two."""
    tx = optax_mp.mixed_precision(optax.adamw(1e-3))
    layers = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, BF16), LAYERS)
    state = jax.eval_shape(jax.vmap(tx.init), layers)

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(optax_mp.scan_layers(block, x, layers)[0] ** 2)

    x = jax.ShapeDtypeStruct(X.shape, BF16)
    for max_norm in (None, 1.0):
        settings = {} if max_norm is None else {"max_norm": max_norm}
        yield optax_mp.release_gradients(loss, tx, **settings), (state, layers, x)

    def with_head(layers: Any, head: Any, x: jax.Array) -> jax.Array:
        return loss(layers, x) + jnp.mean(head["w"] ** 2)

    scale = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
    head = {"w": jax.ShapeDtypeStruct((64,), BF16)}
    step = optax_mp.release_gradients(with_head, tx)

    def behind_a_scale(state: Any, layers: Any, head: Any, scale: Any, x: Any) -> Any:
        return step(state, layers, head, x, rest_state=scale)

    yield behind_a_scale, (state, layers, head, jax.eval_shape(scale.init, head), x)


def of(make: Callable[[], optax.GradientTransformation]) -> Callable[[], Any]:
    """Return the function that yields the steps of a transformation."""
    return lambda: steps(make())


# The form, the words of tables that mean it, and its programs.
FORMS: dict[str, tuple[str, Callable[[], Iterator[Program]]]] = {
    "masters": ("masters|FullCopy|mixed_precision", of(masters)),
    "Split(16)": (r"Split\(16|Split$", lambda: split(16)),
    "Split(8)": (
        r"Split\(8|compact|5\.1 bytes|4\.1 bytes",
        lambda: split(8),
    ),
    "low-bit state": (
        r"8-bit (state|moments)|16-bit moments|compact|low_bit_state|[45]\.1 bytes",
        low_bit,
    ),
    "stochastic rounding": (
        "stochastic rounding|4\\.1 bytes",
        of(lambda: optax_mp.stochastic_rounding(ADAMW)),
    ),
    "loss scale": (
        "loss scale|^f16|float16 with",
        scaled,
    ),
    "average": ("average", of(lambda: optax_mp.with_average(masters(), 0.999))),
    "amp": (r"^amp\b", under_amp),
    "release": ("release$", released),
    "offload": ("offload", of(lambda: optax_mp.offload(masters()))),
    "zero1": ("zero1", of(zero1)),
    # The last: once a link has run, masters in the same process look for its mark.
    "link": (
        "^link",
        of(lambda: optax.chain(optax_mp.dynamic_loss_scale(), masters())),
    ),
}


def text_of(program: Program, platform: str) -> str:
    """Return the lowered text of a program, without names and locations."""
    function, arguments = program
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    names: dict[str, str] = {}
    return re.sub(
        # Not the targets of custom calls, which say what is called.
        r"(?<!custom_call )@[\w.$]+",
        lambda x: names.setdefault(x[0], f"@f{len(names)}"),
        text,
    )


def fingerprint(form: str, platform: str) -> str:
    """Return the fingerprint of a form's programs on a platform."""
    texts = [text_of(program, platform) for program in FORMS[form][1]()]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:10]


@functools.cache
def fingerprints() -> dict[str, str]:
    """Return the fingerprints of all forms, by "form on platform".

    Of a process of their own, in which nothing that ran before changes a program.
    """
    command = [sys.executable, str(record.FOLDER), Path(__file__).stem]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(line.split(": ") for line in done.stdout.splitlines())


def forms_in(tables: record.Tables) -> list[str]:
    """Return the forms that tables name, in a title, a column or a cell."""
    words = {*tables, *(key for rows in tables.values() for row in rows for key in row)}
    rows = [row for rows in tables.values() for row in rows]
    words |= {x for row in rows for x in row.values() if isinstance(x, str)}
    return [
        name
        for name, (pattern, _) in FORMS.items()
        if any(re.search(pattern, word) for word in words)
    ]


def platforms_of(machine: str, command: str, tables: record.Tables) -> list[str]:
    """Return the platforms that a result is about."""
    columns = (str(x) for rows in tables.values() for row in rows for x in row.values())
    words = " ".join((machine, command, *tables, *columns))
    return [name for name, pattern in PLATFORMS.items() if re.search(pattern, words)]


def names_in(machine: str, command: str, tables: record.Tables) -> list[str]:
    """Return the names of the fingerprints of a result."""
    platforms = platforms_of(machine, command, tables)
    return [f"{x} on {y}" for x in forms_in(tables) for y in platforms]


def of_result(machine: str, command: str, tables: record.Tables) -> dict[str, str]:
    """Return the fingerprints of a result that is made now."""
    now = fingerprints()
    return {name: now[name] for name in names_in(machine, command, tables)}


def fresh_tables(path: Path | None) -> record.Tables:
    """Return the rows of a file that are of this program, and of this JAX.

    A benchmark that takes long begins with them, so that it goes on after an
    interruption, and measures only what has changed.
    """
    if path is None or not path.exists():
        return {}
    found = record.read(path)
    if found.versions.get("jax") != metadata.version("jax"):
        return {}
    now, before = fingerprints(), found.fingerprints or {}

    def is_fresh(title: str, row: record.Row) -> bool:
        names = names_in(found.machine, found.command, {title: [row]})
        return all(before.get(x) == now[x] for x in names)

    return {
        title: [row for row in rows if is_fresh(title, row)]
        for title, rows in found.tables.items()
    }


def stale(records: Mapping[str, record.Record]) -> dict[str, str]:
    """Return the results of an earlier program, and in words how to renew each.

    Those that were made with another version of JAX are not judged, but for those that
    have no fingerprints of this kind.
    """
    now, times, how = fingerprints(), record.run_times(), {}
    here = metadata.version("jax")
    for name, found in records.items():
        before = found.fingerprints or {}
        names = names_in(found.machine, found.command, found.tables)
        is_judged = found.versions.get("jax") == here
        changed = [
            x for x in names if x not in before or is_judged and before[x] != now.get(x)
        ]
        if changed:
            time = times.get(found.script, "time not known")
            command = f"`{found.command} --json FILE`, {time}"
            how[name] = f"{', '.join(changed)} changed; {command}"
    return how


def main() -> None:
    """Print the fingerprints of all forms."""
    for form in FORMS:
        for platform in PLATFORMS:
            print(f"{form} on {platform}: {fingerprint(form, platform)}", flush=True)


if __name__ == "__main__":
    main()
