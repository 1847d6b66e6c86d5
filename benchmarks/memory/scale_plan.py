"""Bytes, traffic and seconds of each device in training runs that are only planned.

    python benchmarks scale_plan  # 1B to 1T weights on 8 to 4096 devices
    python benchmarks scale_plan --weights 70B --devices 64 512
    python benchmarks scale_plan --json FILE  # also the tables as data

No device is asked and no array is made: everything is read off `jax.eval_shape`. Tests
compare these numbers with compiled programs on eight devices.

Of N devices in data parallelism, with P bytes of params, G of gradients and S of
optimizer state, each device holds and sends a step (rings; what is sent is received by
the next, so count it once):

    replicated      P + G + S              all-reduce of G:         2 (N-1)/N G
    zero1           P + G + S/N            reduce-scatter of G, gather of P:
                                           (N-1)/N (G + P)
    fully sharded   (P + G + S)/N          gather of P forward and backward, reduce-
                                           scatter of G:            (N-1)/N (2 P + G)

Where XLA makes no reduce-scatter (on CPU), zero1 sends 2 (N-1)/N G for it. An array of
which no axis is divided by N is counted whole. More than 64 devices are taken as two
mesh axes, which may cut two axes of an array. Activations are not counted.

With `offload` the large arrays of the state are in the host's memory; the device holds
two chunks of them. A step reads and writes each once over the bus between host and
device, which takes longer than the optimizer itself. The training step that this is
compared with takes 6 FLOPs for each weight and token.
"""

import argparse
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import record

import optax_mp

VOCABULARY = 32768
# Name: (layers, width) of a transformer with 12 width^2 weights a layer.
MODELS = {
    "1B": (16, 2048),
    "7B": (32, 4096),
    "70B": (80, 8192),
    "405B": (126, 16384),
    "1T": (128, 25600),
}
DEVICES = (8, 64, 512, 4096)
LAYOUTS = ("replicated", "zero1", "fully sharded")


def adamw(form: str) -> optax.GradientTransformation:
    """Return AdamW in one of the forms that a weight's bytes take."""
    inner = optax.adamw(1e-3)
    if form == "float32":
        return inner
    if form == "5.1 bytes":
        return optax_mp.mixed_precision(
            optax_mp.low_bit_state(inner), storage=optax_mp.Split(bits=8)
        )
    storage = {
        "full copies": optax_mp.FullCopy(),
        "split 16": optax_mp.Split(bits=16),
        "split 8": optax_mp.Split(bits=8),
    }[form]
    return optax_mp.mixed_precision(inner, storage=storage)


FORMS = ("float32", "full copies", "split 16", "split 8", "5.1 bytes")
# The forms that are also planned with their state in the host's memory.
OFFLOADED = ("full copies", "5.1 bytes")
CHUNK, ON_DEVICE = 2**26, 2**16  # bytes, and elements, as `offload` has by default
MEMORIES = (16, 80, 141)  # GB of a TPU v5e, an H100, an H200
BUS = (16, 32, 64)  # GB/s in each direction; both at once are not assumed
TOKENS = 8192  # on each device in a step
# bfloat16 products at 40% of a TPU v5e's 197 TFLOP/s and an H100's 989.
RATES = {"TPU v5e": 0.4 * 197e12, "H100": 0.4 * 989e12}


class Plan(NamedTuple):
    """What one device holds and sends; all in bytes.

    Attributes:
        held: params, gradients and optimizer state.
        sent: in a step.
    """

    held: float
    sent: float


def transformer(layers: int, width: int, dtype: Any) -> Any:
    """Return the params of a decoder as shapes: layers stacked, as `scan` has them."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return {
        "embedding": array(VOCABULARY, width),
        "layers": {
            "query_key_value": array(layers, width, 3 * width),
            "attention_out": array(layers, width, width),
            "up": array(layers, width, 4 * width),
            "down": array(layers, 4 * width, width),
            "norms": array(layers, 2, width),
        },
        "norm": array(width),
        "head": array(width, VOCABULARY),
    }


def part_of(shape: tuple[int, ...], mesh: tuple[int, ...]) -> int:
    """Return into how many parts an array is cut: each mesh axis where it divides."""
    parts = [1] * len(shape)
    for count in mesh:
        for axis, size in enumerate(shape):
            if size % (parts[axis] * count) == 0:
                parts[axis] *= count
                break
    return math.prod(parts)


def mesh_of(devices: int) -> tuple[int, ...]:
    """Return the axes of data parallelism: two of them where one would be too long."""
    return (devices,) if devices <= 64 else (devices // 64, 64)


def size_of(tree: Any, mesh: tuple[int, ...] = ()) -> int:
    """Return the bytes of a tree, or of one device's parts of it."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // part_of(leaf.shape, mesh)
        for leaf in jax.tree.leaves(tree)
    )


def plan(params: Any, state: Any, devices: int, layout: str) -> Plan:
    """Return what one device holds and sends, by the formula above."""
    mesh, share = mesh_of(devices), (devices - 1) / devices
    whole, grads = size_of(params), size_of(params)
    if layout == "replicated":
        return Plan(whole + grads + size_of(state), 2 * share * grads)
    if layout == "zero1":
        return Plan(whole + grads + size_of(state, mesh), share * (grads + whole))
    held = 2 * size_of(params, mesh) + size_of(state, mesh)
    return Plan(held, share * (2 * whole + grads))


def without_state(params: Any, state: Any, devices: int, layout: str) -> Plan:
    """Return what one device holds and sends with the state in the host's memory."""
    kept = [x for x in jax.tree.leaves(state) if math.prod(x.shape) < ON_DEVICE]
    found = plan(params, kept, devices, layout)
    return found._replace(held=found.held + 2 * CHUNK)


def state_of(params: Any, form: str) -> Any:
    """Return the optimizer state of planned params."""
    return jax.eval_shape(adamw(form).init, params)


def table_of(name: str, device_counts: list[int]) -> list[record.Row]:
    """Return a row for each form and layout: GB held and GB sent, by devices."""
    rows = []
    ways = [(form, form, plan) for form in FORMS]
    ways += [(f"{form}, offload", form, without_state) for form in OFFLOADED]
    for title, form, planned in ways:
        dtype = jnp.float32 if form == "float32" else jnp.bfloat16
        params = transformer(*MODELS[name], dtype)
        state = state_of(params, form)
        for layout in LAYOUTS:
            plans = {n: planned(params, state, n, layout) for n in device_counts}
            row = {"AdamW": title, "layout": layout}
            gb = {str(n): [p.held / 1e9, p.sent / 1e9] for n, p in plans.items()}
            rows.append(row | gb)
    return rows


def bus_table_of(name: str, device_counts: list[int]) -> list[record.Row]:
    """Return seconds over the bus, and of the step itself, with all fully sharded."""
    params = transformer(*MODELS[name], jnp.bfloat16)
    rows: list[record.Row] = []
    for form in OFFLOADED:
        state = state_of(params, form)
        moved = {str(n): 2 * size_of(state, mesh_of(n)) for n in device_counts}
        for rate in BUS:
            seconds = {n: count / (rate * 1e9) for n, count in moved.items()}
            rows.append({"what": f"{form}, {rate} GB/s"} | seconds)
    flops = 6 * size_of(transformer(*MODELS[name], jnp.int8)) * TOKENS
    for device, rate in RATES.items():
        itself = {str(n): flops / rate for n in device_counts}
        rows.append({"what": f"the step itself, {device}"} | itself)
    return rows


def most_weights() -> list[record.Row]:
    """Return how many weights fit on one device, and what their host must hold."""
    params = transformer(*MODELS["7B"], jnp.bfloat16)
    weights = size_of(params) / 2
    rows = []
    for form in OFFLOADED:
        state = size_of(state_of(params, form)) / weights
        for title, held, on_host in (
            (form, 4 + state, 0.0),
            (f"{form}, offload", 4.0, state),
        ):
            row: record.Row = {"AdamW": title}
            for memory in MEMORIES:
                free = memory * 1e9 - (2 * CHUNK if on_host else 0)
                fits = free / held
                row[f"{memory} GB: billions of weights"] = fits / 1e9
                row[f"{memory} GB: GB on the host"] = fits * on_host / 1e9
            rows.append(row)
    return rows


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--weights", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES))
    record.add_option(parser)
    arguments = parser.parse_args()
    print("GB that each device holds (params, gradients, state), GB it sends in a step")
    tables = {}
    for name in arguments.weights:
        count = size_of(transformer(*MODELS[name], jnp.int8))
        title = f"{name}: {count / 1e9:.2f} billion weights"
        tables[title] = table_of(name, arguments.devices)
        title = f"{name}, fully sharded: seconds over the bus to the host"
        tables[title] = bus_table_of(name, arguments.devices)
    tables["What fits on one device, without activations"] = most_weights()
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")
    record.finish(arguments.json, tables, "no machine: computed from shapes")


if __name__ == "__main__":
    main()
