"""Where a step with `offload` keeps its state, compiled for a TPU that is not here.

    python benchmarks host_memory                       # all tables
    python benchmarks host_memory --tables One --rows "masters;LAMB"
    python benchmarks host_memory --json FILE

XLA says of a compiled program what it holds in the memory of the host and of the
device: `pip install --group accelerators`. Nothing is run, and nothing is timed. Params
and state are donated.

All columns are bytes per weight. "device holds" is params, gradients and small state;
"device temporaries" has the state while it is there for the step. `training_step` has
whole steps with `offload`, in which the state comes when the activations are gone.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimizer_forms import adamw, by_optax, clipped, compact, masters, scaled

import optax_mp

SIDE = 4096


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


ONE = {
    "masters": Case(lambda: masters(adamw())),
    "masters, loss scale": Case(lambda: scaled(masters(adamw()))),
    "masters, clipped gradients": Case(lambda: masters(clipped(adamw()))),
    "compact": Case(lambda: compact(adamw())),
    "compact, 24 stacked layers": Case(lambda: compact(adamw()), leaves=1, layers=24),
}
SHARDED = {
    name: ONE[name]._replace(side=4 * SIDE, devices=8)
    for name in ("masters", "compact")
}


def compile_step(case: Case) -> Any:
    """Return the compiled step."""
    tx = optax_mp.offload(case.make())
    shapes = {
        f"w{i:02}": jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)
        for i in range(case.leaves)
    }
    mesh = Mesh(np.array(accelerators.devices_of("v5e", case.devices)), ("devices",))
    by_rows = PartitionSpec(*[None] * bool(case.layers), "devices")
    rows = NamedSharding(mesh, by_rows)
    by_param = jax.tree.map(lambda _: rows, shapes)
    params = accelerators.place(shapes, by_param)
    state = accelerators.place(
        jax.eval_shape(case.make().init, shapes),
        optax_mp.state_shardings(tx, shapes, by_param),
    )
    jitted = jax.jit(by_optax(tx), donate_argnums=(0, 1))
    return jitted.lower(params, state, params).compile()


def measure(name: str, case: Case) -> record.Row:
    """Return what one device and its host hold in a step."""
    found = compile_step(case).memory_analysis()
    weights = math.prod(case.shape) * case.leaves // case.devices
    return {
        "step": name,
        "state on the host": found.host_argument_size_in_bytes / weights,
        "overwritten there": found.host_alias_size_in_bytes / weights,
        "device holds": found.argument_size_in_bytes / weights,
        "device temporaries": found.temp_size_in_bytes / weights,
        "host temporaries": found.host_temp_size_in_bytes / weights,
    }


TABLES = {
    "One device, leaves of 4096 x 4096": ONE,
    "Rows sharded over eight devices, 4 leaves of 16384 x 16384": SHARDED,
}


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default="", help="some, by how titles begin")
    parser.add_argument("--rows", default="", help="some, by how their names begin")
    record.add_option(parser)
    args = parser.parse_args()
    titles, starts = tuple(args.tables.split(";")), tuple(args.rows.split(";"))
    tables: record.Tables = {}
    machine = f"{accelerators.MACHINE}; for a TPU v5e with 16 GiB"
    for title, cases in TABLES.items():
        for name, case in cases.items():
            if title.startswith(titles) and name.startswith(starts):
                row = measure(name, case)
                tables.setdefault(title, []).append(row)
                print(row, flush=True)
                # At once, so that an interrupted run keeps what it has.
                record.finish(args.json, tables, machine, accelerators.PACKAGES)
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")


if __name__ == "__main__":
    main()
