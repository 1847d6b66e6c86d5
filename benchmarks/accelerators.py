"""Bytes that a compiled optimizer step moves and needs, for TPUs and GPUs not here.

    python benchmarks/accelerators.py                      # both, all forms
    python benchmarks/accelerators.py --target tpu --forms masters,link
    python benchmarks/accelerators.py --json FILE

A step updates the params by AdamW, params and state donated, gradients given. Its time
on a TPU or GPU is the bytes that it moves over the memory's bandwidth. XLA compiles for
hardware that is not there and says how many those are: `pip install libtpu`, and for
GPUs `jax-cuda12-pjrt` and `jax-cuda12-plugin` of jax's version, with `--no-deps`, and
`nvidia-cuda-nvcc-cu12`. Nothing here is run, and nothing is timed.

"limit" counts each array of the step once where it is read and once where it is
written. "temporaries" is memory beside params, state and gradients.
"""

import argparse
import functools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The compilers want to know that no hardware is to be looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import record  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import optax_mp  # noqa: E402

# So large that no array fits into memory on the chip, whose traffic is not counted.
LEAVES, SIDE = 4, 8192
# A TPU's memory on the chip left to kernels, so that XLA moves no whole array there
# ahead of a kernel. Such moves would be counted twice.
NO_PREFETCH = {"xla_tpu_scoped_vmem_limit_kib": "114688"}
GPU = Path(__file__).with_name("h100.txtpb")
KERNELS = ("tpu_custom_call", "triton")

BF16, F32 = "bfloat16", "float32"
adamw = functools.partial(optax.adamw, 1e-3)
masters = optax_mp.mixed_precision


def compact() -> optax.GradientTransformation:
    """Return AdamW at 5.1 bytes per weight."""
    return masters(optax_mp.low_bit_state(adamw()), storage=optax_mp.Split(bits=8))


def clipped() -> optax.GradientTransformation:
    """Return the same behind clipping by the global norm."""
    rate = optax.linear_schedule(1e-3, 0.0, 100)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return masters(optax_mp.low_bit_state(chain), storage=optax_mp.Split(bits=8))


def scaled(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with a loss scale around it."""
    return optax_mp.dynamic_loss_scale(inner)


def linked(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with a loss scale in front of it, in a chain."""
    return optax.chain(optax_mp.dynamic_loss_scale(), inner)


def split(bits: int) -> optax.GradientTransformation:
    """Return AdamW with split masters."""
    return masters(adamw(), storage=optax_mp.Split(bits))


def unmastered() -> optax.GradientTransformation:
    """Return AdamW at 4.1 bytes per weight."""
    return optax_mp.stochastic_rounding(optax_mp.low_bit_state(adamw()))


# Form: (transformation, dtype of params, of gradients, bytes per weight at the least).
FORMS: dict[str, tuple[Callable[[], Any], str, str, float]] = {
    "float32": (adamw, F32, F32, 28),
    "apply_if_finite": (lambda: optax.apply_if_finite(adamw(), 9), F32, F32, 32),
    "masters": (lambda: masters(adamw()), BF16, BF16, 30),
    "masters, float32 gradients": (lambda: masters(adamw()), BF16, F32, 32),
    "loss scale": (lambda: scaled(masters(adamw())), BF16, BF16, 32),
    "loss scale, float32 gradients": (lambda: scaled(masters(adamw())), BF16, F32, 36),
    "link": (lambda: linked(masters(adamw())), BF16, BF16, 32),
    "link, float32 gradients": (lambda: linked(masters(adamw())), BF16, F32, 36),
    "Split(16)": (lambda: split(16), BF16, BF16, 26),
    "Split(8)": (lambda: split(8), BF16, BF16, 24),
    "8-bit state": (lambda: optax_mp.low_bit_state(adamw()), F32, F32, 16.25),
    "5.1 bytes": (compact, BF16, BF16, 12.25),
    "5.1 bytes, clipped": (clipped, BF16, BF16, 14.25),
    "5.1 bytes, loss scale": (lambda: scaled(compact()), BF16, BF16, 14.25),
    "stochastic rounding": (unmastered, BF16, BF16, 10.25),
}


def device_of(target: str) -> Any:
    """Return a device that XLA can compile for."""
    if target == "tpu":
        return topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    description = topologies.get_topology_desc(
        platform="cuda", target_config=GPU.read_text(), topology="1x1x1"
    )
    return description.devices[0]


def measure(form: str, device: Any, side: int) -> record.Row:
    """Return what one step of a form moves and needs, in bytes per weight."""
    make, param_dtype, grad_dtype, limit = FORMS[form]
    tx = make()

    # Donated buffers go to results of the same shape in order: hence this order.
    def by_optax(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def in_one_pass(params: Any, state: Any, grads: Any) -> Any:
        return optax_mp.take_step(tx, grads, state, params)

    row: record.Row = {"form": form, "limit": float(limit)}
    for way, step in {"": by_optax, ", take_step": in_one_pass}.items():
        compiled = compile_step(step, tx, param_dtype, grad_dtype, device, side)
        weights = LEAVES * side * side
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        row[f"moved{way}"] = bytes_moved(compiled) / weights
        row[f"temporaries{way}"] = temporaries / weights
    return row


def compile_step(
    step: Callable[..., Any],
    tx: optax.GradientTransformation,
    param_dtype: str,
    grad_dtype: str,
    device: Any,
    side: int,
) -> Any:
    """Return a step compiled for a device."""
    mesh = Mesh(np.array([device]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def tree(dtype: str) -> Any:
        return {
            f"w{i}": jax.ShapeDtypeStruct((side, side), dtype) for i in range(LEAVES)
        }

    params, grads = tree(param_dtype), tree(grad_dtype)
    state = jax.eval_shape(tx.init, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    lowered = jitted.lower(place(params), place(state), place(grads))
    is_tpu = device.platform == "tpu"
    return lowered.compile(compiler_options=NO_PREFETCH if is_tpu else None)


def bytes_moved(compiled: Any) -> float:
    """Return the bytes that a compiled program reads and writes."""
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
        sizes[name.lstrip("%")] = bytes_of(
            rest.split("(")[0] if not operation else result
        )
        if operation and any(kernel in line for kernel in KERNELS):
            total += bytes_of(result)
            operands = operation.split("), ")[0]
            total += sum(sizes[each] for each in re.findall(r"%([\w.-]+)", operands))
    return total


def bytes_of(types: str) -> int:
    """Return the bytes of the arrays in a type of XLA, such as `(f32[2,3], s8[4])`."""
    return sum(
        math.prod(map(int, filter(None, shape.split(","))))
        * max(1, int(bits or 8) // 8)
        for bits, shape in re.findall(r"\b(?:bf|[fsu]|pred)(\d*)\[([\d,]*)\]", types)
    )


def main() -> None:
    """Read the options and print a table for each target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("tpu", "gpu"), help="one of the two")
    parser.add_argument("--forms", help="some of them, by how their names begin")
    parser.add_argument("--side", type=int, default=SIDE, help="rows of a leaf")
    record.add_option(parser)
    args = parser.parse_args()
    starts = tuple((args.forms or "").split(","))
    names = {"tpu": "TPU v5e", "gpu": "H100"}
    tables: record.Tables = {}
    for target in [args.target] if args.target else ["tpu", "gpu"]:
        device, rows = device_of(target), []
        for form in (x for x in FORMS if x.startswith(starts)):
            rows.append(measure(form, device, args.side))
            print(names[target], rows[-1], flush=True)
        tables[f"AdamW compiled for {names[target]}, bytes per weight"] = rows
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")
    record.finish(
        args.json, tables, "no machine: compiled, not run", ("jax", "jaxlib", "optax")
    )


if __name__ == "__main__":
    main()
