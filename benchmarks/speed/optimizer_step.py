"""Time, memory and compile time of an optimizer step, against plain float32 optax.

    python benchmarks optimizer_step             # Markdown tables
    python benchmarks optimizer_step --rounds 5  # quicker, noisier
    python benchmarks optimizer_step --json FILE    # also the tables as data

Every contender is one jitted program with donated params and state:
(gradients, params, state) -> (params, state), AdamW throughout. The contenders take
turns, several steps at a time, so that a slow moment of the machine hits all alike; the
figures are medians over rounds, as ratios to plain float32 optax in the same run.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

SHAPES = [(2048, 2048)] * 4
TITLE = "16.8M weights in 4 leaves"
FIRST_CALL_SHAPES = [(64, 64)] * 400
FIRST_CALL_TITLE = "First call of 400 leaves of 64 x 64: trace, lower and compile"
FIRST_CALLS = (
    "plain optax, float32",
    "apply_if_finite, float32",
    "mixed_precision, bf16, bf16 gradients",
    "loss scale around, bf16, bf16 gradients",
    "Split(8), bf16, bf16 gradients",
    "Split(8), 8-bit state, bf16, bf16 gradients",
    "loss scale as a link, bf16, f32 gradients",
)
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Contender:
    """One way to take an optimizer step.

    Attributes:
        name: the row's name.
        param_dtype: the dtype of the params.
        grad_dtype: the dtype of the gradients.
        init: from params to state.
        step: (grads, params, state) -> (params, state).
    """

    name: str
    param_dtype: Any
    grad_dtype: Any
    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def from_transform(
    name: str, param_dtype: Any, grad_dtype: Any, tx: optax.GradientTransformation
) -> Contender:
    """Return the step that every optax loop takes with `tx`."""

    def step(grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Contender(name, param_dtype, grad_dtype, tx.init, step)


def behind_a_link(
    name: str, param_dtype: Any, grad_dtype: Any, inner: optax.GradientTransformation
) -> Contender:
    """Return the step of a chain with a loss scale in front of `inner`."""
    tx = optax.chain(optax_mp.dynamic_loss_scale(), inner)
    return from_transform(name, param_dtype, grad_dtype, tx)


def flash_optim() -> list[Contender]:
    """Return FlashOptim's AdamW, if it is installed."""
    if importlib.util.find_spec("flashoptim_jax") is None:
        return []
    import flashoptim_jax

    # Its kernels have no form for CPUs.
    tx = flashoptim_jax.flash_adamw(LEARNING_RATE, weight_decay=1e-4, fused=False)

    def step(grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
        return tx.step(params, state, grads)

    return [Contender("FlashOptim, bf16", jnp.bfloat16, jnp.bfloat16, tx.init, step)]


def hand_written(name: str, param_dtype: Any, grad_dtype: Any) -> Contender:
    """Return float32 masters as people write them into their own loop."""
    tx = optax.adamw(LEARNING_RATE)

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return masters, tx.init(masters)

    def step(grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
        masters, inner = state
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner = tx.update(grads, inner, masters)
        masters = optax.apply_updates(masters, updates)
        params = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params)
        return params, (masters, inner)

    return Contender(name, param_dtype, grad_dtype, init, step)


def where_on_every_leaf(name: str, all_finite: Callable[[Any], jax.Array]) -> Contender:
    """Return a loss scale as jmp and flax document it, for float32 params.

    Both unscale, check, update, and then choose between old and new by a `where` on
    every leaf; they differ in how they check.
    """
    tx = optax.adamw(LEARNING_RATE)

    def init(params: Any) -> Any:
        return jnp.float32(2.0**10), jnp.int32(0), tx.init(params)

    def step(grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
        scale, counter, inner = state
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = all_finite(grads)
        updates, new_inner = tx.update(grads, inner, params)
        new_params = optax.apply_updates(params, updates)
        chosen = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (new_params, new_inner),
            (params, inner),
        )
        grows = finite & (counter == 1999)
        scale = jnp.where(finite, jnp.where(grows, scale * 2, scale), scale / 2)
        counter = jnp.where(finite & ~grows, counter + 1, 0)
        return chosen[0], (scale, counter, chosen[1])

    return Contender(name, jnp.float32, jnp.float32, init, step)


def finite_at_once(grads: Any) -> jax.Array:
    """Return whether all is finite, as jmp asks."""
    leaves = jax.tree.leaves(grads)
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def finite_one_by_one(grads: Any) -> jax.Array:
    """Return whether all is finite, as flax asks."""
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(grads):
        finite &= jnp.all(jax.lax.is_finite(leaf))
    return finite


def contenders() -> list[Contender]:
    """Return every way that is compared; the first is what ratios refer to."""
    f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
    adamw = optax.adamw(LEARNING_RATE)
    ours = optax_mp.mixed_precision(adamw)
    scaled = optax_mp.dynamic_loss_scale(ours)
    low_bit = optax_mp.low_bit_state(adamw)
    split16, split8, compact = (
        optax_mp.mixed_precision(inner, storage=optax_mp.Split(bits))
        for inner, bits in ((adamw, 16), (adamw, 8), (low_bit, 8))
    )
    return [
        from_transform("plain optax, float32", f32, f32, adamw),
        from_transform("naive bf16", bf16, bf16, adamw),
        from_transform("apply_if_finite, float32", f32, f32,
                       optax.apply_if_finite(adamw, 5)),
        hand_written("hand-written masters, bf16, f32 gradients", bf16, f32),
        hand_written("hand-written masters, bf16, bf16 gradients", bf16, bf16),
        from_transform("mixed_precision, bf16, f32 gradients", bf16, f32, ours),
        from_transform("mixed_precision, bf16, bf16 gradients", bf16, bf16, ours),
        from_transform("mixed_precision, f16, f32 gradients", f16, f32, ours),
        from_transform("mixed_precision, f16, f16 gradients", f16, f16, ours),
        where_on_every_leaf("jmp's loop, float32", finite_at_once),
        where_on_every_leaf("flax's loop, float32", finite_one_by_one),
        from_transform("loss scale, plain optax, float32", f32, f32,
                       optax_mp.dynamic_loss_scale(adamw)),
        from_transform("loss scale around, bf16, f32 gradients", bf16, f32, scaled),
        from_transform("loss scale around, bf16, bf16 gradients", bf16, bf16, scaled),
        from_transform("loss scale around, f16, f32 gradients", f16, f32, scaled),
        from_transform("loss scale around, f16, f16 gradients", f16, f16, scaled),
        from_transform("Split(16), bf16, bf16 gradients", bf16, bf16, split16),
        from_transform("Split(16), bf16, f32 gradients", bf16, f32, split16),
        from_transform("Split(16), f16, f16 gradients", f16, f16, split16),
        from_transform("Split(8), bf16, bf16 gradients", bf16, bf16, split8),
        from_transform("Split(8), 8-bit state, bf16, bf16 gradients", bf16, bf16,
                       compact),
        from_transform("8-bit state, plain optax, float32", f32, f32, low_bit),
        from_transform("stochastic rounding, bf16, bf16 gradients", bf16, bf16,
                       optax_mp.stochastic_rounding(adamw)),
        *flash_optim(),
        # Last: once a link has run, float32 gradients are searched for its mark.
        behind_a_link("loss scale as a link, plain optax, float32", f32, f32, adamw),
        behind_a_link("loss scale as a link, bf16, f32 gradients", bf16, f32, ours),
        behind_a_link("loss scale as a link, f16, f16 gradients", f16, f16, ours),
        from_transform("mixed_precision, bf16, f32 gradients, a link ran before",
                       bf16, f32, ours),
    ]  # fmt: skip


@dataclass
class Running:
    """A contender with its compiled step and the arrays that it steps."""

    contender: Contender
    compiled: Any
    compile_seconds: float
    first_call_seconds: float
    carry: tuple[Any, Any]
    grads: Any
    step_seconds: list[float]

    @classmethod
    def start(cls, contender: Contender, shapes: list[tuple[int, ...]]) -> "Running":
        """Make the arrays and compile the step."""
        keys = jax.random.split(jax.random.key(0), len(shapes))
        names = [f"leaf{i:03d}" for i in range(len(shapes))]

        def draw(dtype: Any) -> dict[str, jax.Array]:
            return {
                name: (0.02 * jax.random.normal(key, shape)).astype(dtype)
                for name, key, shape in zip(names, keys, shapes, strict=True)
            }

        params, grads = draw(contender.param_dtype), draw(contender.grad_dtype)
        state = contender.init(params)
        jitted = jax.jit(contender.step, donate_argnums=(1, 2))
        first = time.process_time()
        lowered = jitted.lower(grads, params, state)
        began = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - began, time.process_time() - first
        return cls(contender, compiled, *seconds, (params, state), grads, [])

    def run(self, steps: int) -> None:
        """Take `steps` steps and note the time of one."""
        carry = self.carry
        began = time.perf_counter()
        for _ in range(steps):
            carry = self.compiled(self.grads, *carry)
        jax.block_until_ready(carry)
        self.step_seconds.append((time.perf_counter() - began) / steps)
        self.carry = carry

    def bytes_a_weight(self) -> tuple[float, float]:
        """Return what params and state hold, and the program's temporaries."""
        weights = sum(leaf.size for leaf in jax.tree.leaves(self.carry[0]))
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(self.carry))
        memory = self.compiled.memory_analysis()
        return held / weights, memory.temp_size_in_bytes / weights


def first_calls() -> list[dict]:
    """Return what the first call of a step with many leaves takes, in CPU seconds."""
    by_name = {contender.name: contender for contender in contenders()}
    rows: list[dict] = []
    for name in FIRST_CALLS:
        jax.clear_caches()
        seconds = Running.start(by_name[name], FIRST_CALL_SHAPES).first_call_seconds
        first = rows[0]["CPU s"] if rows else seconds
        rows.append({"AdamW step": name, "CPU s": seconds, "ratio": seconds / first})
    return rows


def measure(shapes: list[tuple[int, ...]], args: argparse.Namespace) -> list[dict]:
    """Return the rows of one table."""
    running = [Running.start(contender, shapes) for contender in contenders()]
    for _ in range(args.rounds):
        for each in running:
            each.run(args.steps)
    medians = [statistics.median(each.step_seconds[1:]) for each in running]
    rows = []
    for each, step in zip(running, medians, strict=True):
        held, temporary = each.bytes_a_weight()
        rows.append(
            {
                "AdamW step": each.contender.name,
                "ms": step * 1e3,
                "ratio": step / medians[0],
                "bytes per weight": held,
                "temporaries": temporary,
                "compile s": each.compile_seconds,
                "compile ratio": each.compile_seconds / running[0].compile_seconds,
            }
        )
    return rows


def main() -> None:
    """Read the options and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row a round")
    record.add_option(parser)
    args = parser.parse_args()
    devices = jax.devices()[:1]
    print(record.heading(devices))
    tables = {TITLE: measure(SHAPES, args), FIRST_CALL_TITLE: first_calls()}
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}", flush=True)
    record.finish(args.json, tables, record.machine_of(devices))


if __name__ == "__main__":
    main()
