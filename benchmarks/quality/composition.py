"""Everything at once on eight devices, resumed at half time, against float32.

    python benchmarks composition              # eight simulated CPU devices
    python benchmarks composition --json FILE

A loss scale, clipping, `MultiSteps`, an average of the masters, 24-bit masters with
8-bit moments and `zero1` fine-tune the model of `finetune`, in float16.
Half way the run is saved by Orbax, thrown away and restored.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before JAX is imported.
FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{FLAG} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import record  # noqa: E402
from finetune import (  # noqa: E402
    FINE_TUNING,
    PRETRAINING,
    clipped_adamw,
    gaps,
    held_out_losses,
    interval,
    pretrained,
    read_code,
)
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from the_demo import Settings, make_loss  # noqa: E402

import optax_mp  # noqa: E402

EVERY = 2  # Batches for each step of `MultiSteps`.
AVERAGE = 0.01  # How far the average moves to the weights in a step.
SETTINGS = replace(FINE_TUNING, steps=300, batch_size=8, seeds=(0, 1, 2))
OVERFLOWS_AT = (37, 200)  # Batches whose loss is infinite.
ALL = "all at once, f16"


def all_at_once(settings: Settings, mesh: Mesh) -> optax.GradientTransformation:
    """Return every wrapper around AdamW behind a clip."""
    inner = optax_mp.low_bit_state(clipped_adamw(settings), min_size=128)
    inner = optax.MultiSteps(inner, EVERY).gradient_transformation()
    inner = optax_mp.mixed_precision(inner, storage=optax_mp.Split(8))
    inner = optax_mp.dynamic_loss_scale(inner, growth_interval=50)
    return optax_mp.zero1(inner, mesh, "data")


Step = Callable[[Any, jax.Array, int], Any]


def make_step(
    settings: Settings, mesh: Mesh, dtype: str, tx: optax.GradientTransformation
) -> Step:
    """Return a step of params, state and an average of the weights, by number."""
    loss_of, everywhere = make_loss(settings, dtype), NamedSharding(mesh, P())
    over_batch = NamedSharding(mesh, P("data"))
    text = jax.device_put(read_code(settings.context)[0], everywhere)
    window = np.arange(settings.context + 1)
    has_scale = dtype == "float16"
    gradients = optax_mp.value_and_grad(
        lambda params, windows, factor: factor * loss_of(params, windows)
    )

    @jax.jit
    def step(run: Any, key: jax.Array, number: jax.Array) -> Any:
        params, state, average = run
        key, shape = jax.random.fold_in(key, number), (settings.batch_size, 1)
        starts = jax.random.randint(key, shape, 0, text.size - settings.context)
        windows = jax.lax.with_sharding_constraint(text[starts + window], over_batch)
        # Only a loss scale can do anything about them.
        overflows = jnp.isin(number, jnp.array(OVERFLOWS_AT)) & has_scale
        factor = jnp.where(overflows, jnp.inf, 1.0)
        _, grads = gradients(state, params, windows, factor)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        weights = optax_mp.master_params(state, params) if has_scale else params
        return params, state, optax.incremental_update(weights, average, AVERAGE)

    return step


def train(
    step: Step, run: Any, settings: Settings, seed: int, is_broken: bool = False
) -> Any:
    """Return a run after all steps; half way it may be saved, lost and restored."""
    for number in range(settings.steps):
        if is_broken and number == settings.steps // 2:
            run = saved_and_restored(run)
        # Steps in flight together can starve each other's collectives on few cores.
        run = jax.block_until_ready(step(run, jax.random.key(seed), number))
    return run


def saved_and_restored(run: Any) -> Any:
    """Save a run by Orbax, forget it, and return what comes back."""
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, run)
            checkpointer.wait_until_finished()
            jax.tree.map(lambda x: x.delete(), run)
            optax_mp.check_checkpoint(checkpointer.metadata(path), template)
            return checkpointer.restore(path, template)


def rows_of(settings: Settings, mesh: Mesh, start: optax.Params) -> list[record.Row]:
    """Train in float32, and in all wrappers without a break and with one."""
    everywhere = NamedSharding(mesh, P())
    per_step = replace(settings, steps=settings.steps // EVERY)
    plain = optax.MultiSteps(clipped_adamw(per_step), EVERY).gradient_transformation()
    ends: dict[str, list[Any]] = {}
    for name, dtype, tx in (
        ("float32", "float32", plain),
        (ALL, "float16", all_at_once(per_step, mesh)),
    ):
        step = make_step(settings, mesh, dtype, tx)
        for seed in settings.seeds:
            params = optax_mp.cast_floating(start, dtype)
            params, average = jax.device_put((params, start), everywhere)
            run = params, jax.jit(tx.init)(params), average
            kept = jax.tree.map(jnp.copy, run)
            ends.setdefault(name, []).append(train(step, run, settings, seed))
            if name == ALL:
                broken = train(step, kept, settings, seed, is_broken=True)
                ends.setdefault(f"{name}, resumed", []).append(broken)
            print(f"{name}, seed {seed}", file=sys.stderr)
    held_out = jax.device_put(read_code(settings.context)[1], everywhere)
    evaluate = jax.jit(make_loss(settings, "float32"))
    rows: list[record.Row] = []
    for name, runs in ends.items():
        held = jax.tree.leaves(runs[0][:2])
        on_device = sum(x.addressable_shards[0].data.nbytes for x in held)
        count = sum(x.size for x in jax.tree.leaves(runs[0][0]))
        row = {"run": name, "seeds": settings.seeds}
        row |= {"bytes per weight": on_device / count}
        row["losses"] = [
            [float(evaluate(run[place], held_out)) for place in (0, 2)] for run in runs
        ]
        means = held_out_losses(row).mean(0)
        above = gaps(row, rows[0], held_out_losses).T if rows else None
        for place, title in enumerate(("code", "average")):
            row[title] = f"{means[place]:.4f}"
            row[f"{title}, above"] = "" if above is None else interval(above[place])
        if name != "float32":
            row["skipped"] = sum(int(run[1].total_skipped_count) for run in runs)
        if name.endswith("resumed"):
            is_same = as_bits(runs) == as_bits(ends[ALL])
            row["the same bits"] = "yes" if is_same else "**no**"
        rows.append(row)
    return rows


def as_bits(tree: Any) -> list[bytes]:
    """Return all arrays as bytes."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="batches")
    parser.add_argument("--seeds", type=int, nargs="+", default=SETTINGS.seeds)
    parser.add_argument("--pretraining", type=int, default=PRETRAINING.steps)
    record.add_option(parser)
    args = parser.parse_args()
    settings = replace(SETTINGS, steps=args.steps, seeds=tuple(args.seeds))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    start = pretrained(replace(PRETRAINING, steps=args.pretraining))
    rows = rows_of(settings, mesh, start)
    title = f"after {settings.steps} batches"
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    packages = ("jax", "optax", "orbax-checkpoint")
    machine = record.machine_of(jax.devices())
    record.finish(args.json, {title: rows}, machine, packages)


if __name__ == "__main__":
    main()
