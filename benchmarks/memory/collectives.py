"""What a training step sends between devices, and in which dtype it sums.

    python benchmarks collectives                # compiled for eight CPU devices
    python benchmarks collectives --tpu v5e:2x4  # for TPUs, which need not be there
    python benchmarks collectives --gpu          # for H100s, likewise
    python benchmarks collectives --errors       # of sums, against float64
    python benchmarks collectives --json FILE    # also the tables as data

For TPUs and GPUs it wants the compilers of the extra `accelerators`, and no hardware.
Batches of a two-layer model are split over the data axis; its params are replicated.
"MB" is what a device sends to others in one step, in a ring, by the text of the
compiled program (`benchmarks/memory/exchanges.py`).
"""

import argparse
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
from exchanges import exchanges

WIDTH, BATCH, DEVICES = 1024, 16384, 8
COUNTS = (2, 4, 8, 16, 32, 64)


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="such as v5e:2x4")
    parser.add_argument("--gpu", action="store_true", help="eight H100s")
    parser.add_argument("--errors", action="store_true", help="errors of sums alone")
    record.add_option(parser)
    args = parser.parse_args()
    # Another process may compile for a TPU at the same time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if not (args.tpu or args.gpu):
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    if args.errors:
        title = "Largest error, as a share of the largest sum, of normal bf16 gradients"
        rows = [errors(count) for count in COUNTS]
        print(f"### {title}\n\n{record.as_markdown(rows)}")
        record.finish(args.json, {title: rows}, record.cpu_in_words())
    else:
        report(args.tpu, args.gpu, args.json)


def errors(count: int) -> dict[str, Any]:
    """Return the errors of sums over so many devices or micro-batches."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import optax_mp

    numbers = np.random.default_rng(0).normal(size=(count, 4096))
    grads = jnp.asarray(numbers, jnp.bfloat16)
    exact = np.asarray(grads, np.float64).sum(0)

    def error(found: Any) -> str:
        wide = np.asarray(found, np.float64).reshape(-1)
        return f"{np.abs(wide - exact).max() / np.abs(exact).max():.1e}"

    def over_devices(**settings: Any) -> Any:
        each = functools.partial(optax_mp.sum_gradients, axis_name="d", **settings)
        return jax.vmap(each, axis_name="d")(grads)

    def over_batches(dtype: str) -> Any:
        return optax.microbatch(lambda g: g[0].astype(dtype), 0, 1)(grads)

    def over_steps(make: Callable[[Any], Any]) -> Any:
        tx, params = make(optax.sgd(1.0)), jnp.zeros(4096, jnp.bfloat16)
        state, update = tx.init(params), jax.jit(tx.update)
        for each in grads:
            _, state = update(each, state, params)
        return -count * optax_mp.master_params(state, params)

    def steps(inner: Any) -> Any:
        return optax.MultiSteps(inner, count)

    return {
        "sum of": f"{count} gradients",
        "one by one in bf16": error(functools.reduce(np.add, np.asarray(grads))),
        "sum_gradients": error(over_devices()[0]),
        "with scatter": error(over_devices(scatter=True)),
        "optax's SUM": error(over_batches("bfloat16")),
        "of float32 gradients": error(over_batches("float32")),
        "MultiSteps inside": error(
            over_steps(lambda tx: optax_mp.mixed_precision(steps(tx)))
        ),
        "MultiSteps around": error(
            over_steps(lambda tx: steps(optax_mp.mixed_precision(tx)))
        ),
    }


def devices_of(topology: str | None, on_gpu: bool) -> list[Any]:
    """Return the devices to compile for."""
    if on_gpu:
        import accelerators

        return accelerators.devices_of("gpu", DEVICES)
    import jax
    from jax.experimental import topologies

    if topology is None:
        return jax.devices()
    return list(topologies.get_topology_desc(topology, "tpu").devices)


def report(topology: str | None, on_gpu: bool, path: Path | None) -> None:
    """Compile and report, once the devices are chosen."""
    devices = devices_of(topology, on_gpu)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import optax_mp

    mesh = Mesh(np.array(devices), ("data",))
    count = len(devices)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def plain(loss: Any, state: Any, params: Any, x: jax.Array) -> Any:
        if isinstance(state, optax_mp.LossScaleState):
            return optax_mp.value_and_grad(loss)(state, params, x)[1]
        return jax.grad(loss)(params, x)

    def for_each(loss: Any, state: Any, params: Any, x: jax.Array) -> Any:
        each = jax.vmap(jax.grad(loss), (None, 0), spmd_axis_name="data")
        return each(params, x.reshape(count, -1, WIDTH))

    def by_hand(loss: Any, state: Any, params: Any, x: jax.Array) -> Any:
        def on_each(params: Any, x: jax.Array) -> Any:
            return optax_mp.sum_gradients(jax.grad(loss)(params, x), "data")

        specs, whole = (P(), P("data")), P()
        return jax.shard_map(
            on_each, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False
        )(params, x)

    masters = optax_mp.mixed_precision(optax.adamw(1e-3))
    scaled = optax_mp.dynamic_loss_scale(masters)
    in_parts = functools.partial(optax_mp.zero1, mesh=mesh, axis="data")
    bf16, f32 = jnp.bfloat16, jnp.float32
    forms: dict[str, tuple[Any, Any, Callable[..., Any], Any, Any]] = {
        "plain optax": (optax.adamw(1e-3), None, plain, loss, bf16),
        "masters": (masters, None, plain, loss, bf16),
        "masters, zero1": (masters, {}, plain, loss, bf16),
        "loss scale, zero1": (scaled, {}, plain, loss, bf16),
        "masters, zero1, exchange_dtype": (
            masters, {"exchange_dtype": bf16}, for_each, loss, bf16
        ),
        "masters, sum_gradients": (masters, None, by_hand, loss, bf16),
        "amp": (optax.adamw(1e-3), None, plain, optax_mp.amp(loss), f32),
    }  # fmt: skip
    shapes = {"bias": (WIDTH,), "down": (4 * WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)}
    sizes = {f"['{name}']": math.prod(shape) for name, shape in shapes.items()}
    rows = []
    for name, (bare, settings, gradients, fun, dtype) in forms.items():
        tx = bare if settings is None else in_parts(bare, **settings)
        whole = NamedSharding(mesh, P())
        params = {
            key: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
            for key, shape in shapes.items()
        }
        x = jax.ShapeDtypeStruct(
            (BATCH, WIDTH), dtype, sharding=NamedSharding(mesh, P("data"))
        )
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(bare.init, params),
            optax_mp.state_shardings(tx, params),
        )

        def step(
            params: Any, state: Any, x: jax.Array, tx: Any, gradients: Any, fun: Any
        ) -> Any:
            grads = gradients(fun, state, params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1), static_argnums=(3, 4, 5))
        lowered = jitted.lower(params, state, x, tx, gradients, fun)
        text = lowered.compile().as_text() or ""
        rows += [
            {
                "AdamW": name,
                "kind": row.kind,
                "param": row.param,
                "sent in": row.dtype,
                "summed in": row.sum_dtype or "",
                "times": row.times,
                "MB": row.bytes / 1e6,
            }
            for row in exchanges(text, sizes, count)
            if row.param and row.bytes > 1e5
        ]
    where = "TPU " + topology if topology else "H100" if on_gpu else "CPU"
    title = f"XLA for {where}, {count} x {devices[0].device_kind}"
    print(f"{record.heading(devices)}\n\n### {title}\n\n{record.as_markdown(rows)}")
    packages = ("jax", "libtpu") if topology else ("jax", "jaxlib")
    machine = f"no machine: compiled for {record.machine_of(devices)}"
    record.finish(path, {title: rows}, machine, packages)


if __name__ == "__main__":
    main()
