"""Where a step with `offload` keeps its state, compiled for a TPU that is not here.

    python benchmarks host_memory                       # all tables
    python benchmarks host_memory --tables One --rows masters,LAMB
    python benchmarks host_memory --json FILE

XLA says of a compiled program what it holds in the memory of the host and of the
device: `pip install --group accelerators`. Nothing is run, and nothing is timed.

"state on the host" and "overwritten there" are bytes per weight; so is "device holds",
which is params, gradients and small state. Temporaries are MiB; "two chunks and an
update" is what the device should need of them, with the update of one leaf in its
dtype: float32 for the compact form and with a loss scale. "by take_step" makes no
update and should need two chunks. Params and state are donated.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

# First: it tells JAX that no hardware is to be looked for.
import accelerators
import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from forms import adamw, by_optax, compact, in_one_pass, masters, scaled
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optax_mp

MIB, GIB = 2**20, 2**30
CHUNK = 2**26
SIDE = 4096
TPU = "TPU v5e with 16 GiB"


def clipped() -> optax.GradientTransformation:
    """Return AdamW behind clipping by the global norm of the gradients."""
    return masters(optax.chain(optax.clip_by_global_norm(1.0), adamw()))


def clipped_after() -> optax.GradientTransformation:
    """Return AdamW with its updates clipped by their global norm."""
    return masters(optax.chain(adamw(), optax.clip_by_global_norm(1.0)))


class Case(NamedTuple):
    """A step to compile.

    Attributes:
        make: makes the transformation whose state is kept on the host.
        leaves: how many params there are, all of one shape.
        side: rows and columns of each.
        devices: over how many the rows are sharded.
        layers: how many matrices a param stacks; 0 for one that is a matrix.
    """

    make: Callable[[], optax.GradientTransformation]
    leaves: int = 4
    side: int = SIDE
    devices: int = 1
    layers: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a param."""
        return (self.layers, self.side, self.side)[not self.layers :]


def wide_masters() -> optax.GradientTransformation:
    """Return AdamW with float32 masters."""
    return masters(adamw())


def five_bytes() -> optax.GradientTransformation:
    """Return AdamW at 5.1 bytes per weight."""
    return compact(adamw())


ONE = {
    "masters": Case(wide_masters),
    "masters, 8 leaves": Case(wide_masters, leaves=8),
    "masters, leaves of 8192 x 8192": Case(wide_masters, side=8192),
    "masters, loss scale": Case(lambda: scaled(wide_masters())),
    "masters, clipped gradients": Case(clipped),
    "masters, clipped updates": Case(clipped_after),
    "5.1 bytes": Case(five_bytes),
    "5.1 bytes, 24 stacked layers": Case(five_bytes, leaves=1, layers=24),
    "5.1 bytes, loss scale": Case(lambda: scaled(five_bytes())),
    "LAMB": Case(lambda: masters(optax.lamb(1e-3))),
    "Adafactor": Case(lambda: masters(optax.adafactor(1e-3))),
    "Muon": Case(lambda: masters(optax.contrib.muon(1e-3))),
}
SHARDED = {
    name: Case(case.make, side=16384, devices=8)
    for name, case in ONE.items()
    if name in ("masters", "masters, clipped gradients", "5.1 bytes", "LAMB")
}
LARGE = {
    "masters": Case(wide_masters, leaves=24, side=8192),
    "5.1 bytes": Case(five_bytes, leaves=24, side=8192),
}


def compile_step(
    case: Case, by: Callable[..., Any] = by_optax, *, is_offloaded: bool = True
) -> Any:
    """Return a compiled step, as `by` makes it of a transformation."""
    inner = case.make()
    shapes = {
        f"w{i:02}": jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)
        for i in range(case.leaves)
    }
    state = jax.eval_shape(inner.init, shapes)
    devices = accelerators.devices_of("tpu", case.devices)
    mesh = Mesh(np.array(devices), ("devices",))
    rows = NamedSharding(mesh, PartitionSpec("devices" if case.devices > 1 else None))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: Any, kind: str) -> Any:
        sharding = (rows if x.ndim else whole).with_memory_kind(kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def kind_of(x: Any) -> str:
        return "pinned_host" if is_offloaded and x.size >= 2**16 else "device"

    params = jax.tree.map(lambda x: place(x, "device"), shapes)
    state = jax.tree.map(lambda x: place(x, kind_of(x)), state)
    tx = inner
    if is_offloaded:
        shardings = jax.tree.map(lambda _: rows, shapes) if case.devices > 1 else None
        tx = optax_mp.offload(inner, chunk_bytes=CHUNK, param_shardings=shardings)
    jitted = jax.jit(by(tx), donate_argnums=(0, 1))
    return jitted.lower(params, state, params).compile()


def update_bytes(case: Case) -> int:
    """Return how many bytes an update takes per weight."""
    param = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    inner = case.make()
    state = jax.eval_shape(inner.init, param)
    return jax.eval_shape(inner.update, param, state, param)[0].dtype.itemsize


def measure(name: str, case: Case) -> record.Row:
    """Return what one device and its host hold in a step."""
    found = compile_step(case).memory_analysis()
    in_one = compile_step(case, in_one_pass).memory_analysis()
    leaf = math.prod(case.shape) // case.devices
    weights = leaf * case.leaves
    return {
        "step": name,
        "state on the host": found.host_argument_size_in_bytes / weights,
        "overwritten there": found.host_alias_size_in_bytes / weights,
        "device holds": found.argument_size_in_bytes / weights,
        "host temporaries, MiB": found.host_temp_size_in_bytes / MIB,
        "device temporaries, MiB": found.temp_size_in_bytes / MIB,
        "by take_step, MiB": in_one.temp_size_in_bytes / MIB,
        "by take_step on the host, MiB": in_one.host_temp_size_in_bytes / MIB,
        "two chunks and an update, MiB": (2 * CHUNK + update_bytes(case) * leaf) / MIB,
    }


def measure_large(name: str, case: Case) -> record.Row:
    """Return what a model needs whose state exceeds the device, with and without."""
    found = compile_step(case).memory_analysis()
    row: record.Row = {
        "step": name,
        "weights": case.leaves * case.side**2,
        "state on the host, GiB": found.host_argument_size_in_bytes / GIB,
        "device holds, GiB": found.argument_size_in_bytes / GIB,
        "temporaries, GiB": found.temp_size_in_bytes / GIB,
        "host temporaries, GiB": found.host_temp_size_in_bytes / GIB,
    }
    try:
        # As it is best on a TPU.
        plain = compile_step(case, in_one_pass, is_offloaded=False).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        print(f"{name} without offload: {str(error)[:600]}", flush=True)
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        row["without `offload`"] = "out of memory when compiled"
    else:
        needed = plain.argument_size_in_bytes + plain.temp_size_in_bytes
        row["without `offload`"] = f"{needed / GIB:.1f} GiB"
    return row


# Title: (what is measured, the steps).
TABLES: dict[str, tuple[Callable[[str, Case], record.Row], dict[str, Case]]] = {
    "One device, 4 leaves of 4096 x 4096": (measure, ONE),
    "Rows sharded over eight devices, 4 leaves of 16384 x 16384": (measure, SHARDED),
    "Larger than the device: 24 leaves of 8192 x 8192": (measure_large, LARGE),
}
PACKAGES = ("jax", "jaxlib", "libtpu", "optax")


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default="", help="some, by how titles begin")
    parser.add_argument("--rows", default="", help="some, by how their names begin")
    record.add_option(parser)
    args = parser.parse_args()
    titles, starts = tuple(args.tables.split(",")), tuple(args.rows.split(","))
    tables: record.Tables = {}
    machine = f"{accelerators.MACHINE}; for a {TPU}"
    for title, (measured, cases) in TABLES.items():
        for name, case in cases.items():
            if title.startswith(titles) and name.startswith(starts):
                row = measured(name, case)
                tables.setdefault(title, []).append(row)
                print(row, flush=True)
                # At once, so that an interrupted run keeps what it has.
                record.finish(args.json, tables, machine, PACKAGES)
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")


if __name__ == "__main__":
    main()
