"""What a GPU or a TPU does with all forms, by one command of nine minutes or less.

    python benchmarks on_device            # writes benchmarks/results/<device>.json
    python benchmarks on_device --small    # anywhere, in seconds: does it run?

It needs the package and a JAX for the device (`jax[cuda12]`, `jax[tpu]`), nothing else.
Where torch, flashoptim or flashoptim-jax is installed, its optimizers are timed as
well.

- Time per step of AdamW, all arrays on the device: plain optax, masters by hand, every
  form, and the compact form by hand. "GB/s" is the least traffic over the time.
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
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import optimizer_forms as forms  # noqa: E402
import optimizer_step  # noqa: E402
import record  # noqa: E402

import optax_mp  # noqa: E402

STEPPED = (
    "float32",
    "masters",
    "loss scale",
    "Split(16)",
    "Split(8)",
    "8-bit state",
    "compact",
    "compact, clipped",
    "compact, loss scale",
    "stochastic rounding, 8-bit state",
    "by hand, clipped",
)


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


def contenders(scale: Scale) -> dict[str, tuple[optimizer_step.Contender, float]]:
    """Return ways to take a step of AdamW, and the bytes per weight at the least."""
    bf16 = jnp.dtype(jnp.bfloat16)
    by_hand = optimizer_step.hand_written("", bf16, bf16)
    plain = optimizer_step.from_transform("", bf16, bf16, forms.adamw())
    found = {"plain optax, bf16": (plain, 14.0), "masters by hand": (by_hand, 28.0)}
    for name in STEPPED:
        form = forms.FORMS[name]
        found[name] = contender(form, form.make()), form.limit(scale.shapes)
    with contextlib.suppress(ImportError):
        make = importlib.import_module("flashoptim_jax").flash_adamw
        flash = make(learning_rate=1e-3, weight_decay=1e-4)
        found["flashoptim-jax"] = (
            optimizer_step.Contender(
                "flashoptim-jax", bf16, bf16, flash.init,
                lambda grads, params, state: flash.step(params, state, grads),
            ),
            12.0,
        )  # fmt: skip
    return found


def contender(
    form: forms.Form, tx: optax.GradientTransformation
) -> optimizer_step.Contender:
    """Return the step of a transformation, in a form's dtypes."""
    dtypes = jnp.dtype(form.param_dtype), jnp.dtype(form.grad_dtype)
    return optimizer_step.from_transform("", *dtypes, tx)


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
    "bf16, compact": Training(forms.BF16, forms.BF16, forms.compact),
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
        return *forms.by_optax(tx)(params, state, grads), value

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
    bare = forms.FORMS[form]
    entry = contender(bare, optax_mp.offload(bare.make()))
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
    for name, (entry, least) in contenders(run.scale).items():
        run.add("time of a step of AdamW", name, time_step, entry, least)
    for name, way in TRAININGS.items():
        run.add("training", name, train, way)
    run.add("host memory", "the bus alone", time_bus)
    for form in ("masters", "compact"):
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
