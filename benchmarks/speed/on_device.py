"""What a GPU or a TPU does with all forms, by one command of nine minutes or less.

    python benchmarks on_device            # writes benchmarks/results/<device>.json
    python benchmarks on_device --small    # anywhere, in seconds: does it run?

It needs the package and a JAX for the device (`jax[cuda12]`, `jax[tpu]`), nothing else.
Where torch, flashoptim or flashoptim-jax is installed, its optimizers are timed as
well.

- Time per step of AdamW, all arrays on the device: plain optax, masters by hand, every
  form by `tx.update` and by `take_step`. "GB/s" is the least traffic over the time.
- Kernels against XLA: elements that differ after two steps from random codes, bit by
  bit with products that no compiler contracts, and how many are far as it is used.
- A small transformer, trained from the same weights in float32, bf16, f16 with a loss
  scale and with a compact state: losses and time per step.
- `offload`: what its step moves between host and device, against the bus alone.

A table of its own lists runs that failed or found no time.
"""

import argparse
import contextlib
import functools
import importlib
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# torch also needs some of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import amp  # noqa: E402
import forms  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import optimizer_step  # noqa: E402
import record  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

import optax_mp  # noqa: E402
from optax_mp._take_step import bind_step  # noqa: E402
from optax_mp.engine import (  # noqa: E402
    _kernels,
    _layout,
    _proof,
    _tailwise,
)
from optax_mp.engine._by_platform import Target  # noqa: E402

PACKED = ("Split(16)", "Split(8)", "8-bit state", "5.1 bytes",
          "5.1 bytes, loss scale", "stochastic rounding")  # fmt: skip
STEPPED = ("float32", "masters", "loss scale", *PACKED)


@dataclass(frozen=True)
class Scale:
    """How much is computed.

    Attributes:
        leaves: how many params an optimizer steps.
        side: rows and columns of each.
        rounds: how often a step is timed.
        steps: how many steps in a row are timed.
        model: the transformer.
        training_steps: how many steps it is trained.
    """

    leaves: int
    side: int
    rounds: int
    steps: int
    model: amp.Size
    training_steps: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shape of each param."""
        return [(self.side, self.side)] * self.leaves


SCALES = {
    "full": Scale(4, 8192, 5, 10, amp.Size(16, 512, 768, 12, 8192, 6), 300),
    "small": Scale(1, 256, 1, 1, amp.Size(2, 16, 32, 2, 64, 1), 4),
}


@dataclass
class Run:
    """The results so far.

    Attributes:
        scale: how much is computed.
        seconds: after how many nothing more begins.
        titles: how the titles of the tables begin that are wanted.
        tables: the rows of each table.
        began: when it began.
    """

    scale: Scale
    seconds: float
    titles: tuple[str, ...] = ("",)
    tables: record.Tables = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def add(self, title: str, name: str, measure: Callable[..., record.Row],
            *args: Any) -> None:  # fmt: skip
        """Add a row, or say why there is none."""
        if not title.startswith(self.titles):
            return
        try:
            if time.monotonic() - self.began > self.seconds:
                raise TimeoutError(f"{self.seconds:.0f} seconds were over")
            row = {"what": name} | measure(self.scale, *args)
        except Exception as error:  # whatever it is, the rest is to run
            title = "not run"
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            row = {"what": name, "why": why}
        self.tables.setdefault(title, []).append(row)
        print(title, row, flush=True)


# Time per step


def contenders() -> dict[str, tuple[optimizer_step.Contender, float]]:
    """Return ways to take a step of AdamW, and the bytes per weight at the least."""
    bf16 = jnp.dtype(jnp.bfloat16)
    by_hand = optimizer_step.hand_written("", bf16, bf16)
    plain = optimizer_step.from_transform("", bf16, bf16, forms.adamw())
    found = {"plain optax, bf16": (plain, 14.0), "masters by hand": (by_hand, 28.0)}
    for form in STEPPED:
        tx, least = forms.FORMS[form][0](), forms.FORMS[form][-1]
        ways = {"tx.update": forms.by_optax(tx), "take_step": forms.in_one_pass(tx)}
        for way, step in ways.items():
            found[f"{form}, {way}"] = contender(form, tx.init, step), least
    with contextlib.suppress(ImportError):
        make = importlib.import_module("flashoptim_jax").flash_adamw
        flash = make(learning_rate=1e-3, weight_decay=1e-4)
        found["flashoptim-jax"] = contender("masters", flash.init, flash.step), 12.0
    return found


def contender(form: str, init: Any, step: Any) -> optimizer_step.Contender:
    """Return a way to take a step, with params and gradients in a form's dtypes."""

    def with_grads_first(grads: Any, params: Any, state: Any) -> Any:
        return step(params, state, grads)

    _, *dtypes, _ = forms.FORMS[form]
    return optimizer_step.Contender(
        form, *map(jnp.dtype, dtypes), init, with_grads_first
    )


def time_step(
    scale: Scale, entry: optimizer_step.Contender, least: float
) -> record.Row:
    """Return the time of a step."""
    running = optimizer_step.Running.start(entry, scale.shapes)
    for _ in range(scale.rounds + 1):
        running.run(scale.steps)
    held, temporaries = running.bytes_a_weight()
    return figures(scale, running.step_seconds[1:], least) | {
        "bytes per weight": held,
        "temporaries": temporaries,
        "compile s": running.compile_seconds,
    }


def figures(scale: Scale, seconds: list[float], least: float) -> record.Row:
    """Return the time of a step as milliseconds and as bytes per second."""
    step, weights = statistics.median(seconds), scale.leaves * scale.side**2
    return {"ms": step * 1e3, "GB/s": least * weights / step / 1e9}


# Name, dtype, bytes per weight at the least.
OF_TORCH = (
    ("torch, fused", "float32", 28.0),
    ("torch, fused", "bfloat16", 14.0),
    ("flashoptim", "bfloat16", 12.0),
)


def time_torch(scale: Scale, name: str, dtype: str, least: float) -> record.Row:
    """Return the time of a step of an optimizer of torch's kind."""
    torch = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = {"device": device, "dtype": getattr(torch, dtype)}
    params = [torch.nn.Parameter(torch.randn(x, **made)) for x in scale.shapes]
    for param in params:
        param.grad = torch.randn(param.shape, **made)
    if name == "flashoptim":
        optimizer = importlib.import_module("flashoptim").FlashAdamW(params, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    wait = torch.cuda.synchronize if device == "cuda" else int
    seconds = []
    for _ in range(scale.rounds + 1):
        wait()
        began = time.perf_counter()
        for _ in range(scale.steps):
            optimizer.step()
        wait()
        seconds.append((time.perf_counter() - began) / scale.steps)
    return figures(scale, seconds[1:], least) | {"compile s": 0.0}


# Kernels


def compare_kernels(scale: Scale, form: str) -> record.Row:
    """Return in how many elements a form's kernels differ from XLA, bit by bit.

    It is what a first step compares: see `optax_mp/engine/_proof.py`. On a CPU,
    Pallas interprets the kernels of a GPU.
    """
    (device,) = jax.local_devices()[:1]
    platform = {"gpu": "cuda", "cpu": "cuda"}.get(device.platform, device.platform)
    kernels = _kernels.kernels_for(Target(platform, kind=device.device_kind))
    if isinstance(kernels, str):
        raise RuntimeError(f"no kernels: {kernels}")
    if device.platform == "cpu":
        pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    row: record.Row = {"kernels": 0}
    found: list[_proof.Compared] = []
    for tail in tails_of(form, (scale.side, scale.side)):
        part = _layout.Part.of(tail, (), {})
        if tail.obstacle or kernels.obstacle(tail, part):
            continue
        row["kernels"] += 1
        found += _proof.compare(kernels, tail, part, device)
    for dtype in dict.fromkeys(want.dtype for want, *_ in found):
        of_dtype = [x for x in found if x[0].dtype == dtype]
        size = sum(want.size for want, *_ in of_dtype)
        for i, least, name in ((1, 0, "differing"), (2, _proof.NEAR, "far as used")):
            count = sum((_proof.distance(x[0], x[i]) > least).sum() for x in of_dtype)
            row[f"{dtype} {name}"] = f"{count:,} of {size:,}"
    first = next(filter(None, map(_proof.first_difference, found)), "none")
    return row | {"first": first}


def tails_of(form: str, shape: tuple[int, ...]) -> list[Any]:
    """Return the elementwise tails of a step of one leaf."""
    make, *dtypes, _ = forms.FORMS[form]
    tx, found = make(), []
    params, grads = ({"w": jax.ShapeDtypeStruct(shape, x)} for x in dtypes)

    def trace(*args: Any) -> None:
        step, inputs, kept, *_ = bind_step("", tx, *args, None, {})
        traced, obstacle = _tailwise.trace_step(step, inputs, kept)
        assert traced is not None, obstacle
        found.extend(traced.tails)

    jax.eval_shape(trace, grads, jax.eval_shape(tx.init, params), params)
    return found


# Training


@dataclass(frozen=True)
class Training:
    """A way to train the transformer.

    Attributes:
        param_dtype: the dtype of params.
        compute_dtype: the dtype of products.
        wrap: what is around AdamW.
    """

    param_dtype: str
    compute_dtype: str
    wrap: Callable[[Any], Any]


TRAININGS = {
    "float32": Training(forms.F32, forms.F32, lambda tx: tx),
    "plain bf16": Training(forms.BF16, forms.BF16, lambda tx: tx),
    "bf16, masters": Training(forms.BF16, forms.BF16, forms.masters),
    "f16, loss scale": Training(
        "float16", "float16", lambda tx: forms.scaled(forms.masters(tx))
    ),
    "bf16, 5.1 bytes": Training(forms.BF16, forms.BF16, forms.compact),
}


def batches(size: amp.Size, count: int = 16) -> jax.Array:
    """Return sequences in which a token says much of the next."""
    random = np.random.default_rng(0)
    tokens = np.zeros((count, size.batch, size.length + 1), np.int32)
    tokens[..., 0] = random.integers(size.vocabulary, size=(count, size.batch))
    for i in range(size.length):
        noise = random.integers(4, size=(count, size.batch))
        tokens[..., i + 1] = (3 * tokens[..., i] + noise) % size.vocabulary
    return jnp.asarray(tokens)


def train(scale: Scale, way: Training) -> record.Row:
    """Return losses of a training, and its time per step."""
    size = scale.model
    tx = way.wrap(optax.adamw(3e-4))
    params = optax_mp.cast_floating(amp.init(size), way.param_dtype)
    state = tx.init(params)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        cast = functools.partial(jnp.asarray, dtype=way.compute_dtype)
        return amp.loss(params, inputs, size, cast, targets)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = optax_mp.value_and_grad(loss)(state, params, tokens)
        params, state = optax_mp.take_step(tx, grads, state, params)
        return params, state, value

    every, losses = batches(size), []
    for i in range(scale.training_steps):
        if i == 2:  # the state of plain bf16 changes its type in the first step
            jax.block_until_ready(losses)
            began = time.perf_counter()
        params, state, value = step(params, state, every[i % len(every)])
        losses.append(value)
    jax.block_until_ready(losses)
    seconds = time.perf_counter() - began
    last = max(1, len(losses) // 10)
    skipped = optax_mp.metrics(state).get("total_skipped_count", 0)
    return {
        "loss at first": float(losses[0]),
        "loss": float(np.mean(jax.device_get(losses[-last:]))),
        "ms": seconds / (len(losses) - 2) * 1e3,
        "skipped": int(skipped),
        "losses": [float(x) for x in losses[:: max(1, len(losses) // 30)]],
    }


# Host memory


def time_bus(scale: Scale) -> record.Row:
    """Return how fast arrays go to the host and back, with nothing computed."""
    x = jnp.ones((scale.leaves, scale.side, scale.side))
    device = x.sharding
    host = device.with_memory_kind("pinned_host")
    seconds: dict[str, list[float]] = {"to the host": [], "to the device": []}
    for _ in range(scale.rounds + 1):
        for way, sharding in zip(seconds, (host, device), strict=True):
            began = time.perf_counter()
            x = jax.block_until_ready(jax.device_put(x, sharding))
            seconds[way].append(time.perf_counter() - began)
    return {
        f"GB/s {way}": x.nbytes / statistics.median(times[1:]) / 1e9
        for way, times in seconds.items()
    }


def time_offload(scale: Scale, form: str) -> record.Row:
    """Return the time of a step whose state is on the host, and what that moves."""
    tx = optax_mp.offload(forms.FORMS[form][0]())
    entry = contender(form, tx.init, forms.in_one_pass(tx))
    running = optimizer_step.Running.start(entry, scale.shapes)
    on_host = [
        x.nbytes
        for x in jax.tree.leaves(running.carry[1])
        if x.sharding.memory_kind == "pinned_host"
    ]
    for _ in range(scale.rounds + 1):
        running.run(1)
    step = statistics.median(running.step_seconds[1:])
    return {
        "ms": step * 1e3,
        "GB on the host": sum(on_host) / 1e9,
        "GB/s there and back": 2 * sum(on_host) / step / 1e9,
        "temporaries": running.bytes_a_weight()[1],
    }


def measure(run: Run) -> None:
    """Measure everything, what matters most first."""
    for form in PACKED:
        run.add("kernels against XLA, two steps", form, compare_kernels, form)
    for name, (entry, least) in contenders().items():
        run.add("time of a step of AdamW", name, time_step, entry, least)
    for name, way in TRAININGS.items():
        run.add("training", name, train, way)
    run.add("host memory", "the bus alone", time_bus)
    for form in ("masters", "5.1 bytes"):
        run.add("host memory", f"offload, {form}", time_offload, form)
    for name, dtype, least in OF_TORCH:
        title = f"{name}, {dtype}"
        run.add("time of a step of AdamW", title, time_torch, name, dtype, least)


def main() -> None:
    """Read the options, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="to see whether it runs")
    parser.add_argument(
        "--seconds", type=float, default=480, help="begin nothing later"
    )
    parser.add_argument("--tables", default="", help="some, by how titles begin")
    record.add_option(parser)
    args = parser.parse_args()
    devices = jax.devices()[:1]
    print(record.heading(devices), flush=True)
    scale = SCALES["small" if args.small else "full"]
    run = Run(scale, args.seconds, tuple(args.tables.split(",")))
    name = re.sub(r"\W+", "_", devices[0].device_kind.lower())
    path = args.json or Path(__file__).parent / "results" / f"{name}.json"
    try:
        measure(run)
    finally:
        record.finish(path, run.tables, record.machine_of(devices))
    for title, rows in run.tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")


if __name__ == "__main__":
    main()
