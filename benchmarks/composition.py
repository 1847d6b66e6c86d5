"""Everything at once on eight devices, resumed at half time, against float32.

    python benchmarks/composition.py              # eight devices that a CPU stands for
    python benchmarks/composition.py --json FILE

A loss scale, clipping, `MultiSteps`, an average of the masters, 24-bit masters with
8-bit moments and `zero1` fine-tune the model of `benchmarks/finetune.py`, in float16.
Half way the run is saved by Orbax, thrown away and restored.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before JAX is imported.
FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"

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
SETTINGS = replace(FINE_TUNING, steps=400, batch_size=8, seeds=(0, 1, 2))
OVERFLOWS_AT = (37, 250)  # Batches whose loss is infinite.


def all_at_once(settings: Settings, mesh: Mesh) -> optax.GradientTransformation:
    """Return every wrapper around AdamW behind a clip."""
    inner = optax_mp.low_bit_state(clipped_adamw(settings), min_size=128)
    inner = optax.MultiSteps(inner, EVERY).gradient_transformation()
    inner = optax_mp.mixed_precision(inner, storage=optax_mp.Split(8))
    inner = optax_mp.dynamic_loss_scale(inner, growth_interval=50)
    return optax_mp.zero1(inner, mesh, "data")


@dataclass(frozen=True)
class Form:
    """A dtype with an optimizer, and whether the run is saved and restored."""

    name: str
    dtype: str
    is_composed: bool
    is_resumed: bool = False


FORMS = (
    Form("float32", "float32", is_composed=False),
    Form("plain bf16", "bfloat16", is_composed=False),
    Form("all at once, f16", "float16", is_composed=True),
    Form("all at once, f16, resumed", "float16", is_composed=True, is_resumed=True),
)


def train(
    form: Form, settings: Settings, mesh: Mesh, start: optax.Params
) -> tuple[list[Any], list[Any]]:
    """Return at the end of each seed's run: params, state and average; and losses."""
    per_step = replace(settings, steps=settings.steps // EVERY)
    if form.is_composed:
        tx = all_at_once(per_step, mesh)
    else:
        tx = optax.MultiSteps(clipped_adamw(per_step), EVERY).gradient_transformation()
    loss_of, everywhere = make_loss(settings, form.dtype), NamedSharding(mesh, P())
    text, held_out = jax.device_put(read_code(settings.context), everywhere)
    over_batch = NamedSharding(mesh, P("data"))
    window = np.arange(settings.context + 1)
    gradients = optax_mp.value_and_grad(
        lambda params, windows, factor: factor * loss_of(params, windows)
    )

    @jax.jit
    def step(run: Any, key: jax.Array, number: jax.Array) -> tuple[Any, jax.Array]:
        params, state, average = run
        shape = settings.batch_size, 1
        starts = jax.random.randint(
            jax.random.fold_in(key, number), shape, 0, text.size - settings.context
        )
        windows = jax.lax.with_sharding_constraint(text[starts + window], over_batch)
        # Only a loss scale can do anything about them.
        overflows = jnp.isin(number, jnp.array(OVERFLOWS_AT)) & form.is_composed
        factor = jnp.where(overflows, jnp.inf, 1.0)
        loss, grads = gradients(state, params, windows, factor)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        weights = params
        if form.is_composed:
            weights = optax_mp.master_params(state, params)
        average = optax.incremental_update(weights, average, AVERAGE)
        return (params, state, average), loss

    runs, losses = [], []
    for seed in settings.seeds:
        params = optax_mp.cast_floating(start, form.dtype)
        params, average = jax.device_put((params, start), everywhere)
        run = params, jax.jit(tx.init)(params), average
        for number in range(settings.steps):
            if form.is_resumed and number == settings.steps // 2:
                run = saved_and_restored(run)
            run, _ = step(run, jax.random.key(seed), number)
        runs.append(run)
        evaluate = jax.jit(make_loss(settings, "float32"))
        losses.append([float(evaluate(tree, held_out)) for tree in (run[0], run[2])])
    return runs, losses


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
    """Train in all forms; return a row for each."""
    rows, reference, unbroken = [], None, None
    for form in FORMS:
        runs, losses = train(form, settings, mesh, start)
        found = np.asarray(losses)
        reference = found if reference is None else reference
        params, state, _ = runs[0]
        held = jax.tree.leaves((params, state))
        on_device = sum(x.addressable_shards[0].data.nbytes for x in held)
        skipped = [getattr(run[1], "total_skipped_count", None) for run in runs]
        row = {"run": form.name}
        row["bytes per weight"] = on_device / sum(
            x.size for x in jax.tree.leaves(params)
        )
        row["code"] = f"{found[:, 0].mean():.4f}"
        if found is not reference:
            row["code, above"] = interval(found[:, 0] - reference[:, 0])
        row["average of weights"] = f"{found[:, 1].mean():.4f}"
        if found is not reference:
            row["average, above"] = interval(found[:, 1] - reference[:, 1])
        if form.is_composed:
            row["skipped"] = sum(map(int, skipped))
        if form.is_resumed:
            row["the same bits"] = "yes" if as_bits(runs) == unbroken else "**no**"
        unbroken = as_bits(runs)
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
    mesh = jax.make_mesh((8,), ("data",))
    start = pretrained(replace(PRETRAINING, steps=args.pretraining))
    rows = rows_of(settings, mesh, start)
    title = f"after {settings.steps} batches, {len(settings.seeds)} seeds"
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    packages = ("jax", "optax", "orbax-checkpoint")
    machine = record.machine_of(jax.devices())
    record.finish(args.json, {title: rows}, machine, packages)


if __name__ == "__main__":
    main()
