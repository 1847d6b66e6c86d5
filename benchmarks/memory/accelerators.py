"""Bytes that a compiled training step moves and needs, for TPUs and GPUs not here.

    python benchmarks accelerators                      # both, all tables
    python benchmarks accelerators --target tpu --tables AdamW --forms masters,link
    python benchmarks accelerators --json FILE

The time of an optimizer's step on a TPU or GPU is the bytes that it moves over the
memory's bandwidth. XLA compiles for hardware that is not there and says how many those
are: `pip install --group accelerators`. Nothing here is run, and nothing is timed.

"limit" counts each array of the step once where it is read and once where it is
written. "temporaries" is memory beside params, state and gradients. Both are bytes per
weight; params and state are donated.
"""

import argparse
import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# The compilers want to know that no hardware is to be looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import amp  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import record  # noqa: E402
import traffic  # noqa: E402
from forms import (  # noqa: E402
    ALL_FORMS,
    FORMS,
    MUON,
    OTHERS,
    adamw,
    by_optax,
    compact,
    in_one_pass,
    masters,
)
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import optax_mp  # noqa: E402

# So large that no array fits into memory on the chip, whose traffic is not counted.
LEAVES, SIDE = 4, 8192
# A TPU's memory on the chip left to kernels, so that XLA moves no whole array there
# ahead of a kernel. Such moves would be counted twice. XLA then looks for tilings of
# products for many minutes, and a loop's chunks are to stay there: not for these.
NO_PREFETCH = {"xla_tpu_scoped_vmem_limit_kib": "114688"}
GPU = Path(__file__).with_name("h100.txtpb")
KERNELS = ("tpu_custom_call", "triton")


def devices_of(target: str, count: int = 1) -> list[Any]:
    """Return devices that XLA can compile for."""
    if target == "tpu":
        return topologies.get_topology_desc("v5e:2x4", "tpu").devices[:count]
    description = topologies.get_topology_desc(
        platform="cuda", target_config=GPU.read_text(), topology=f"1x{count}x1"
    )
    return description.devices


def measure(form: str, target: str, side: int) -> record.Row:
    """Return what one step of a form moves and needs, in bytes per weight."""
    return measure_leaves(form, target, (side, side))


def measure_one_axis(form: str, target: str, side: int) -> record.Row:
    """Return the same for leaves of one axis."""
    return measure_leaves(form, target, (side * side,))


def measure_heads(form: str, target: str, side: int) -> record.Row:
    """Return the same for attention kernels, as Flax makes them."""
    return measure_leaves(form, target, (2 * side, 16, 64))


def measure_leaves(form: str, target: str, *shapes: Any) -> record.Row:
    """Return what one step of a form moves and needs for leaves of a shape, or more."""
    row: record.Row = {"form": form, "limit": ALL_FORMS[form][-1]}
    shapes = shapes if len(shapes) > 1 else shapes * LEAVES
    for way, compiled in compile_ways(form, target, shapes):
        row |= costs_of(compiled, sum(map(math.prod, shapes)), way)
    return row


def measure_model_leaves(model: str, target: str, side: int) -> record.Row:
    """Return the same for the leaves of a model, in the compact form."""
    shapes = [tuple(map(int, x.split("x"))) for x in MODELS[model].split()]
    return {"model": model} | measure_leaves("5.1 bytes", target, *shapes)


def measure_with_products(form: str, target: str, side: int) -> record.Row:
    """Return the same, and how much of it products of matrices move."""
    row: record.Row = {"form": form, "limit": ALL_FORMS[form][-1]}
    weights = LEAVES * side * side
    for way, compiled in compile_ways(form, target, [(side, side)] * LEAVES):
        products = traffic.bytes_of_products(compiled.as_text()) / weights
        costs = costs_of(compiled, weights, way)
        row |= {f"products{way}": products, f"all{way}": costs.pop(f"moved{way}")}
        row |= costs
    return row


def compile_ways(form: str, target: str, shapes: Any) -> Iterable[tuple[str, Any]]:
    """Compile a form's step with `tx.update` and with `take_step`."""
    make, param_dtype, grad_dtype, _ = ALL_FORMS[form]
    tx = make()
    args = arrays_of(tx, param_dtype, grad_dtype, shapes)
    yield "", compile_step(by_optax(tx), args, target)
    yield ", take_step", compile_step(in_one_pass(tx), args, target)


def measure_without_kernels(form: str, target: str, side: int) -> record.Row:
    """Return the same for `take_step` where no kernel can go."""
    make, param_dtype, grad_dtype, limit = FORMS[form]
    tx = make()
    os.environ["OPTAX_MP_KERNELS"] = "0"
    try:
        args = arrays_of(tx, param_dtype, grad_dtype, [(side, side)] * LEAVES)
        compiled = compile_step(in_one_pass(tx), args, target)
    finally:
        del os.environ["OPTAX_MP_KERNELS"]
    return {"form": form, "limit": limit} | costs_of(compiled, LEAVES * side * side)


def measure_sharded(form: str, target: str, side: int) -> record.Row:
    """Return the same per device, with all arrays sharded by rows over eight."""
    return measure_shards(form, target, (side, side))


def measure_zero1(form: str, target: str, side: int) -> record.Row:
    """Return the same by `zero1`: whole params, and per weight of a device's share."""
    make, param_dtype, grad_dtype, _ = FORMS[form]
    mesh = Mesh(np.array(devices_of(target, 8)), ("devices",))
    tx = optax_mp.zero1(make(), mesh, "devices")
    args = arrays_of(tx, param_dtype, grad_dtype, [(side, side)] * LEAVES)
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), args)
    parts = optax_mp.state_shardings(tx, args[0], whole[0])
    row: record.Row = {"form": form}
    weights = LEAVES * side * side / 8
    for way, step in {"": by_optax(tx), ", take_step": in_one_pass(tx)}.items():
        compiled = compile_step(step, args, target, (whole[0], parts, whole[2]))
        row |= costs_of(compiled, weights, way)
        # XLA counts a collective that starts and is done twice.
        row[f"moved{way}"] = traffic.bytes_moved(compiled.as_text()) / weights
        row[f"collectives{way}"] = collectives_in(compiled)
    return row


def measure_stacked(form: str, target: str, side: int) -> record.Row:
    """Return the same for layers that are stacked for a scan."""
    return measure_shards(form, target, (24, side // 4, side))


def measure_columns(form: str, target: str, side: int) -> record.Row:
    """Return the same for layers in parts of 704 columns, for a side of 8192."""
    return measure_shards(form, target, (24, side // 4, 11 * side // 16), axis=2)


def measure_shards(
    form: str, target: str, shape: tuple[int, ...], axis: int = -2
) -> record.Row:
    """Return the same for leaves of a shape, sharded along an axis."""
    make, param_dtype, grad_dtype, limit = FORMS[form]
    tx, count, weights = make(), 8, LEAVES * math.prod(shape)
    args = arrays_of(tx, param_dtype, grad_dtype, [shape] * LEAVES)
    mesh = Mesh(np.array(devices_of(target, count)), ("devices",))
    along = PartitionSpec(*[None] * (axis % len(shape)), "devices")
    rows, whole = (NamedSharding(mesh, spec) for spec in (along, PartitionSpec()))
    shardings = jax.tree.map(lambda x: rows if x.ndim else whole, args)
    row: record.Row = {"form": form, "limit": limit}
    ways = {
        # Only the arguments of the outer `jit` say how they are sharded.
        ", layout not known": jax.jit(in_one_pass(tx)),
        ", layout of arguments": in_one_pass(tx),
        ", layout known": in_one_pass(tx, param_shardings=shardings[0]),
    }
    for way, step in ways.items():
        compiled = compile_step(step, args, target, shardings)
        row |= costs_of(compiled, weights / count, way)
        # Shards are small enough for memory on the chip, which XLA also counts.
        moved = traffic.bytes_moved(compiled.as_text())
        row[f"moved{way}"] = moved * count / weights
        row[f"collectives{way}"] = collectives_in(compiled)
    return row


def arrays_of(
    tx: optax.GradientTransformation,
    param_dtype: str,
    grad_dtype: str,
    shapes: Iterable[tuple[int, ...]],
) -> tuple[Any, Any, Any]:
    """Return descriptions of params, state and gradients."""

    def tree(dtype: str) -> Any:
        return {f"w{i}": jax.ShapeDtypeStruct(x, dtype) for i, x in enumerate(shapes)}

    params = tree(param_dtype)
    return params, jax.eval_shape(tx.init, params), tree(grad_dtype)


def compile_step(
    step: Callable[..., Any], args: Any, target: str, shardings: Any = None
) -> Any:
    """Return a step compiled for one device, or for the devices of the shardings."""
    if shardings is None:
        mesh = Mesh(np.array(devices_of(target)[:1]), ("devices",))
        whole = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda _: whole, args)

    def place(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    jitted = jax.jit(step, donate_argnums=(0, 1))
    with lowering_for(target):
        lowered = jitted.lower(*jax.tree.map(place, args, shardings))
    program = lowered.as_text()
    is_plain = not any(f"stablehlo.{x}" in program for x in ("while", "dot_general"))
    options = NO_PREFETCH if target == "tpu" and is_plain else None
    return lowered.compile(compiler_options=options)


def lowering_for(target: str) -> contextlib.AbstractContextManager[Any]:
    """Return in which context to lower for a target."""
    if target == "tpu" or not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    # From JAX 0.12 on, kernels ask for which GPU they are.
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def costs_of(compiled: Any, weights: float, way: str = "") -> record.Row:
    """Return what a compiled step moves and needs."""
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return {
        f"moved{way}": bytes_moved(compiled) / weights,
        f"temporaries{way}": temporaries / weights,
    }


def collectives_in(compiled: Any) -> int:
    """Return how many collectives of more than a few numbers a program has."""
    pattern = r"= (\S+) (?:all-gather|all-reduce|all-to-all|collective-permute)"
    found = re.findall(pattern, compiled.as_text())
    return sum(traffic.bytes_of(types) > 1024 for types in found)


def bytes_moved(compiled: Any) -> float:
    """Return the bytes of main memory that a compiled program reads and writes."""
    program = compiled.as_text()
    # XLA counts one trip of a loop, and what stays on the chip.
    if " while(" in program or traffic.has_products(program):
        return traffic.bytes_moved(program)
    return bytes_by_xla(compiled)


def bytes_by_xla(compiled: Any) -> float:
    """Return the bytes that a program moves by XLA's count, in any memory."""
    costs = compiled.cost_analysis()
    if costs is None:  # for GPUs that are not there
        from jaxlib import _jax

        modules = compiled.runtime_executable().hlo_modules()
        client = jax.devices("cpu")[0].client
        costs = _jax.hlo_module_cost_analysis(client, modules[0])
    return costs["bytes accessed"] + bytes_of_kernels(compiled.as_text())


def bytes_of_kernels(program: str) -> int:
    """Return the bytes of operands and results of kernels, which XLA does not count."""
    sizes: dict[str, int] = {}
    total = 0
    for line in program.splitlines():
        name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        if not equals:
            continue
        result, _, operation = rest.partition(" custom-call(")
        sizes[name.lstrip("%")] = traffic.bytes_of(
            rest.split("(")[0] if not operation else result
        )
        if operation and any(kernel in line for kernel in KERNELS):
            total += traffic.bytes_of(result)
            operands = operation.split("), ")[0]
            total += sum(sizes[each] for each in re.findall(r"%([\w.-]+)", operands))
    return total


def measure_model(way: str, target: str, size: amp.Size) -> record.Row:
    """Return what a training step of a transformer moves and needs, in gigabytes."""
    name, make = WAYS[way]
    fun, tx = amp.contenders(size)[name], make()
    params = jax.eval_shape(lambda: amp.init(size))
    if make is not adamw:
        cast = functools.partial(optax_mp.cast_floating, dtype=jnp.bfloat16)
        params = jax.eval_shape(cast, params)
    update = in_one_pass(tx)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        return update(params, state, jax.grad(fun)(params, tokens))

    tokens = jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)
    state = jax.eval_shape(tx.init, params)
    compiled = compile_step(step, (params, state, tokens), target)
    costs = costs_of(compiled, 1e9)
    return {
        "step": way,
        "GB moved": costs["moved"],
        "GB by XLA's count": bytes_by_xla(compiled) / 1e9,
        "temporaries, GB": costs["temporaries"],
    }


# Ways to train it: (the name in `amp.contenders`, the optimizer).
WAYS: dict[str, tuple[str, Callable[[], Any]]] = {
    "float32": ("float32", adamw),
    "bf16 by casting arguments": ("bf16 by casting arguments", adamw),
    "bf16 by hand": ("bf16 by hand", adamw),
    "amp": ("amp, bf16", adamw),
    "bf16 by hand, masters": ("bf16 by hand", lambda: masters(adamw())),
    "amp, masters": ("amp, bf16", lambda: masters(adamw())),
    "amp, 5.1 bytes": ("amp, bf16", lambda: compact(adamw())),
}
MODEL = amp.Size(batch=8, length=1024, width=768, heads=12, vocabulary=4096, blocks=1)
MACHINE = "no machine: compiled, not run"
PACKAGES = ("jax", "jaxlib", "libtpu", "optax")
TARGETS = {"tpu": "TPU v5e", "gpu": "H100"}
# The forms that are measured sharded.
SHARDED = ("masters", "Split(8)", "5.1 bytes", "5.1 bytes, clipped")
# Those that are measured with leaves of one axis.
ONE_AXIS = ("Split(8)", "5.1 bytes", "stochastic rounding")
# Those that have kernels.
PACKED = ("Split(16)", "Split(8)", "8-bit state", *(x for x in FORMS if "5.1" in x))
PACKED += ("stochastic rounding",)

# Leaves of models, their layers stacked: experts and a router, grouped queries, a tied
# embedding (two layers, since eight need 15.9 GB with their gradients, more than a v5e
# has); and a ViT-L with the attention kernels of Flax.
MODELS = {
    "MoE": "2x8x2048x5632 2x8x2048x5632 2x8x5632x2048 2x2048x8 2x2048x16x128 "
    "2x2048x4x128 2x2048x4x128 2x16x128x2048 2x2048 2x2048 2048 128256x2048",
    "ViT-L": "24x1024x16x64 24x1024x16x64 24x1024x16x64 24x16x64x1024 24x1024x4096 "
    "24x4096x1024 24x16x64 24x1024 24x1024 16x16x3x1024 1x577x1024 1024x1000",
}

# Title: (what is measured, the names of the rows).
TABLES: dict[str, tuple[Callable[[str, str, int], record.Row], Iterable[str]]] = {
    "AdamW": (measure, [x for x in FORMS if "link" not in x]),
    "Other optimizers": (measure, OTHERS),
    "Muon": (measure_with_products, MUON),
    "Leaves of one axis, AdamW": (measure_one_axis, ONE_AXIS),
    "Attention kernels, AdamW": (measure_heads, ONE_AXIS),
    "Without kernels, AdamW": (measure_without_kernels, PACKED),
    "Sharded over eight devices, AdamW": (measure_sharded, SHARDED),
    "Stacked layers over eight devices, AdamW": (measure_stacked, SHARDED),
    "Columns over eight devices, AdamW": (measure_columns, SHARDED),
    "By zero1 over eight devices, AdamW": (measure_zero1, ("masters", "5.1 bytes")),
    "Models, AdamW": (measure_model_leaves, MODELS),
    # Last: once a link ran in a process, masters search float32 gradients for its mark.
    "A link before, AdamW": (measure, [x for x in FORMS if "link" in x]),
    "Training step of a transformer": (
        lambda way, target, _: measure_model(way, target, MODEL),
        WAYS,
    ),
}


def main() -> None:
    """Read the options and print a table for each target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, help="one of the two")
    parser.add_argument("--tables", default="", help="some, by how titles begin")
    parser.add_argument("--forms", default="", help="some, by how their names begin")
    parser.add_argument("--side", type=int, default=SIDE, help="rows of a leaf")
    record.add_option(parser)
    args = parser.parse_args()
    titles = tuple(args.tables.split(","))
    starts = tuple(args.forms.split(","))
    tables: record.Tables = {}
    for title, (measured, names) in TABLES.items():
        for target in [args.target] if args.target else TARGETS:
            rows = []
            for name in (x for x in names if x.startswith(starts)):
                if title.startswith(titles):
                    rows.append(measured(name, target, args.side))
                    print(TARGETS[target], rows[-1], flush=True)
            if rows:
                tables[f"{title}, compiled for {TARGETS[target]}"] = rows
                # At once, so that an interrupted run keeps what it has.
                record.finish(args.json, tables, MACHINE, PACKAGES)
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")


if __name__ == "__main__":
    main()
