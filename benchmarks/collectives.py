"""What a training step sends between devices, with zero1 and without.

    python benchmarks/collectives.py                # compiled for eight CPU devices
    python benchmarks/collectives.py --tpu v5e:2x4  # for TPUs, which need not be there
    python benchmarks/collectives.py --json FILE    # the table as data, too

For TPUs it wants the compiler that `pip install libtpu` brings, and no TPU. Batches of
a two-layer model are split over the data axis; its params are replicated, in bfloat16.
Sizes are those of results, as XLA writes them: a ring of collective-permutes of an
eighth of a gradient each, with a piece of the product between two of them, is how its
TPU compiler makes a reduce-scatter.
"""

import argparse
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import record

COLLECTIVE = re.compile(
    r"= (\(?[^=]*?\)?) "
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)
ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+)\[([0-9,]*)\]")
CHANNEL = re.compile(r"\bchannel_id=(\d+)")
WIDTH, BATCH = 1024, 16384


def collectives(program: str) -> Counter[tuple[str, str, int]]:
    """Return how often each (kind, dtype, elements) stands in a program's text.

    One that computing goes on beside is written in several pieces, on one channel.
    """
    found: Counter[tuple[str, str, int]] = Counter()
    seen: set[str] = set()
    for line in re.sub(r"/\*.*?\*/", "", program).splitlines():
        match, channel = COLLECTIVE.search(line), CHANNEL.search(line)
        if match is None or (channel and channel[1] in seen):
            continue
        seen.update(channel.groups() if channel else ())
        arrays = ARRAY.findall(match[1])
        # What a start returns is what it is given, what it makes, and flags.
        for dtype, shape in arrays[1:2] if "-start(" in match[0] else arrays:
            elements = math.prod(int(n) for n in shape.split(",") if n)
            found[match[2], dtype, elements] += 1
    return found


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="such as v5e:2x4")
    record.add_option(parser)
    args = parser.parse_args()
    if args.tpu is None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    report(args.tpu, args.json)


def report(topology: str | None, path: Path | None) -> None:
    """Compile and count, once the devices are chosen."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import optax_mp

    devices: Any = jax.devices() if topology is None else None
    if devices is None:
        devices = topologies.get_topology_desc(topology, "tpu").devices
    mesh = Mesh(np.array(devices), ("data",))
    replicated = NamedSharding(mesh, P())

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "bias": (WIDTH,)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated)
        for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct(
        (BATCH, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
    )
    masters = optax_mp.mixed_precision(optax.adamw(1e-3))
    split = optax_mp.mixed_precision(optax.adamw(1e-3), storage=optax_mp.Split(16))
    scaled = optax_mp.dynamic_loss_scale(masters)
    rows = []
    for name, bare in (
        ("plain optax", optax.adamw(1e-3)),
        ("mixed_precision", masters),
        ("with Split(16)", split),
        ("a loss scale around, f32 gradients", scaled),
    ):
        for sharded in (False, True):
            tx = optax_mp.zero1(bare, mesh, "data") if sharded else bare

            def step(
                params: Any, state: Any, x: jax.Array, tx: Any = tx
            ) -> tuple[Any, Any]:
                grads = optax_mp.value_and_grad(loss)(state, params, x)[1]
                if not isinstance(state, optax_mp.LossScaleState):
                    grads = jax.grad(loss)(params, x)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            cut = NamedSharding(mesh, P("data")) if sharded else replicated
            state = jax.tree.map(
                lambda x, cut=cut: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=cut if x.ndim else replicated
                ),
                jax.eval_shape(bare.init, params),
            )
            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x)
            counted = collectives(compiled.compile().as_text())
            for (kind, dtype, elements), times in sorted(counted.items()):
                if elements > 1:
                    rows.append(
                        {
                            "AdamW, bf16 params": name,
                            "zero1": "yes" if sharded else "no",
                            "times": times,
                            "kind": kind,
                            "dtype": dtype,
                            "elements": elements,
                        }
                    )
    compiler = "XLA for CPU" if topology is None else f"XLA for TPU {topology}"
    title = f"{compiler}, {len(devices)} x {devices[0].device_kind}"
    print(f"{record.heading(devices)}\n\n### {title}\n\n{record.as_markdown(rows)}")
    packages = ("jax", "jaxlib") if topology is None else ("jax", "libtpu")
    machine = f"no machine: compiled for {record.machine_of(devices)}"
    record.finish(path, {title: rows}, machine, packages)


if __name__ == "__main__":
    main()
