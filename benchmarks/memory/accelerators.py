"""Bytes that a compiled optimizer step moves, needs and sends, for TPUs and GPUs.

    python benchmarks accelerators --json FILE  # goes on where it was interrupted
    python benchmarks accelerators --tables "decoder;ViT" --forms "compact, clipped"

The time of an optimizer's step on a TPU or GPU is the bytes that it moves over the
memory's bandwidth. XLA compiles for hardware that is not there (`pip install --group
accelerators`), and `benchmarks/memory/traffic.py` counts what the program moves.
Nothing here is run, and nothing is timed. A step is `tx.update` and
`optax.apply_updates` in one jit, with donated params and state, for the leaves of a
model.

"limit" counts each array of the step once where it is read and once where it is
written, and gradients twice where a step has to know all of them first. "temporaries"
is memory beside params, state and gradients. All are bytes per weight; over eight
devices, of a device and per weight of its eighth.

FSDP shards a param, its state and its gradient along the param's longest axis. "in an
inner jit" says nothing of that where the step is traced: it is a jit inside of the
loop's. zero1 has whole params and gradients on each device.
"""

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The compilers want to know that no hardware is to be looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import by_hand  # noqa: E402
import fingerprints  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import record  # noqa: E402
import traffic  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from optimizer_forms import FORMS, Form, Shapes, by_optax  # noqa: E402

import optax_mp  # noqa: E402

GPU = Path(__file__).with_name("h100.txtpb")
# Slices of eight chips.
TPUS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
MACHINE = "no machine: compiled, not run"
PACKAGES = ("jax", "jaxlib", "libtpu", "optax")
COUNT = 8  # devices, in tables of several


# Models, by the shapes of their leaves


def attention(width: int, heads: int) -> Shapes:
    """Return the kernels of queries, keys, values and output, as Flax has them."""
    inner = (heads, width // heads)
    return [(width, *inner)] * 3 + [(*inner, width)]


def stack(count: int, shapes: Shapes) -> Shapes:
    """Return the leaves of layers that are stacked for a scan."""
    return [(count, *shape) for shape in shapes]


def matrices(width: int) -> Shapes:
    """Return the two matrices of a layer's MLP."""
    return [(width, 4 * width), (4 * width, width)]


NORMS = [(1024,)] * 2
VISION_LAYER = [*attention(1024, 16), *matrices(1024), *NORMS, *NORMS]
VISION_LAYER += [(16, 64)] * 3 + [(1024,), (4096,), (1024,)]
VISION_REST = [(16, 16, 3, 1024), (1, 577, 1024), (1024, 1000)]
EXPERTS = [(8, 2048, 5632), (8, 2048, 5632), (8, 5632, 2048), (2048, 8)]
# Few heads for keys and values.
GROUPED = [(2048, 16, 128), (2048, 4, 128), (2048, 4, 128), (16, 128, 2048)]
MODELS: dict[str, Shapes] = {
    "decoder": [
        *[*attention(1024, 16), *matrices(1024), *NORMS] * 4,
        *[(50304, 1024), (1024,), (1024, 50304)],
    ],
    "ViT": [*VISION_LAYER * 6, *VISION_REST],
    "stacked layers": [*stack(24, VISION_LAYER), *VISION_REST],
    "experts": [
        *stack(2, [*EXPERTS, *GROUPED, (2048,), (2048,)]),
        *[(2048,), (128256, 2048)],
    ],
}


# A step, compiled


def devices_of(target: str, count: int = 1) -> list[Any]:
    """Return devices that XLA can compile for."""
    if target in TPUS:
        return topologies.get_topology_desc(TPUS[target], "tpu").devices[:count]
    return topologies.get_topology_desc(
        platform="cuda", target_config=GPU.read_text(), topology=f"1x{count}x1"
    ).devices


def place(tree: Any, shardings: Any) -> Any:
    """Return descriptions of arrays with their shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def compile_step(form: Form, shapes: Shapes, target: str, layout: str = "") -> Any:
    """Return a form's step, compiled for one device or for eight in a layout."""
    count = COUNT if layout else 1
    mesh = Mesh(np.array(devices_of(target, count)), ("data",))
    params, state, grads = form.arrays(shapes)
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, spec_of(x.shape, layout)), params
    )
    tx = form.make()
    if layout == "zero1":
        tx = optax_mp.zero1(tx, mesh, "data")
    if isinstance(state, by_hand.ByHandState):
        of_state = by_hand.state_shardings(params, shardings)
    else:
        of_state = optax_mp.state_shardings(tx, params, shardings)
    args = place((params, state, grads), (shardings, of_state, shardings))
    step = by_optax(tx)
    if "inner jit" in layout:
        step = jax.jit(step)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def spec_of(shape: tuple[int, ...], layout: str) -> PartitionSpec:
    """Return how a param is sharded: by FSDP along its longest axis, if it divides."""
    longest = int(np.argmax(shape))
    if "FSDP" not in layout or shape[longest] % COUNT:
        return PartitionSpec()
    return PartitionSpec(*[None] * longest, "data")


def labelled(form: str, layout: str) -> str:
    """Return the first cell of a row."""
    return f"{form}, {layout}" if layout else form


def measure(name: str, shapes: Shapes, target: str, layout: str = "") -> record.Row:
    """Return what one step of a form moves, needs and sends."""
    form = FORMS[name]
    compiled = compile_step(form, shapes, target, layout)
    program = compiled.as_text()
    weights = sum(map(math.prod, shapes)) / (COUNT if layout else 1)
    row: record.Row = {"form": labelled(name, layout)}
    if layout != "zero1":  # whose whole params are more than a device's part
        row["limit"] = form.limit(shapes)
    row["moved"] = traffic.bytes_moved(program) / weights
    row["temporaries"] = compiled.memory_analysis().temp_size_in_bytes / weights
    if layout:
        kinds = Counter(kind for kind, _ in traffic.collectives(program))
        found = [f"{n} {kind}" for kind, n in sorted(kinds.items())]
        row["collectives"] = ", ".join(found) or "none"
    return row


# Tables


@dataclass(frozen=True)
class Table:
    """Which steps a table holds.

    Attributes:
        model: whose leaves are stepped.
        target: for which device they are compiled.
        forms: the names of the forms.
        layouts: the layouts over eight devices; an empty name is one device.
    """

    model: str
    target: str
    forms: tuple[str, ...]
    layouts: tuple[str, ...] = ("",)

    @property
    def title(self) -> str:
        """The title: the model, how many devices, and of what kind."""
        count = "one" if self.layouts == ("",) else "eight"
        return f"{self.model}, {count} {self.target}"

    def rows(self) -> Iterator[tuple[str, str]]:
        """Return the form and the layout of each row."""
        for form in self.forms:
            for layout in self.layouts:
                if not (form.startswith("by hand") and layout == "zero1"):
                    yield form, layout


DECIDING = "masters", "compact", "compact, clipped", "compact, loss scale"
CLIPPED = "compact, clipped", "by hand, clipped"
TABLES = (
    Table("decoder", "H100", tuple(FORMS)),
    Table("ViT", "H100", ("float32", *DECIDING, "by hand, clipped")),
    Table("stacked layers", "H100", (*DECIDING, "by hand, clipped")),
    Table("experts", "H100", (*DECIDING, "by hand, clipped")),
    Table("decoder", "H100", CLIPPED, ("FSDP", "FSDP in an inner jit", "zero1")),
    Table("decoder", "v5e", ("masters", *CLIPPED)),
    Table("ViT", "v5e", CLIPPED),
    Table("stacked layers", "v5e", CLIPPED),
    Table("experts", "v5e", CLIPPED),
    Table("decoder", "v6e", CLIPPED[:1]),
    Table("decoder", "v5p", CLIPPED[:1]),
    Table("ViT", "v6e", CLIPPED[:1]),
)


def main() -> None:
    """Read the options, measure row by row, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default="", help="some, by how titles begin")
    parser.add_argument("--forms", default="", help="some, by how their names begin")
    record.add_option(parser)
    args = parser.parse_args()
    titles, starts = (tuple(x.split(";")) for x in (args.tables, args.forms))
    tables = fingerprints.fresh_tables(args.json)
    for table in (x for x in TABLES if x.title.startswith(titles)):
        rows = tables.setdefault(table.title, [])
        done = [row["form"] for row in rows]
        for form, layout in table.rows():
            if form.startswith(starts) and labelled(form, layout) not in done:
                shapes = MODELS[table.model]
                rows.append(measure(form, shapes, table.target, layout))
                print(table.title, rows[-1], flush=True)
                # At once, so that an interrupted run keeps what it has.
                record.finish(args.json, tables, MACHINE, PACKAGES)
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")


if __name__ == "__main__":
    main()
