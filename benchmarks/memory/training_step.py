"""Whole training steps of a language model, compiled for TPUs and GPUs not here.

    python benchmarks training_step                            # small, in minutes
    python benchmarks training_step --size 1.3B --targets v5e,H100  # half an hour
    python benchmarks training_step --size 7B --devices 8 --remat dots --json FILE
    python benchmarks training_step --size uneven --layouts "columns;both"
    python benchmarks training_step --size 1.3B --devices 1 --unrolled

A decoder whose layers are stacked and scanned, with float32 norms; the step is forward,
backward, clipping by the global norm, AdamW with a decay mask and a schedule. Nothing
is run: `pip install --group accelerators` brings the compilers. On eight devices
params, state and batch are sharded: FSDP by rows or columns, or by rows with tensor
parallelism of two by columns. With `--unrolled`, layers are a list and have biases, as
GPT-2's: 291 leaves at 24 layers. With `--micro 4`, a scan sums the gradients of four
batches in float32.

Gigabytes are per device. "peak" is the most that the step holds at once, by XLA: of
params, state, batch and temporaries, in which the gradients are. "moved" is to and
from its main memory. Collectives are of more than 4 KiB, with the gigabytes of their
results; those in the scan over layers count once. A program that XLA finds too
large for the device has a row that says so.

"lowering s" and "compile s" are CPU seconds of all threads and of the assemblers that
XLA calls, the former with tracing; "compile ratio" is their sum over "float32"'s.
"""

import argparse
import functools
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

# First: it tells JAX that no hardware is to be looked for.
import accelerators
import forms
import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
import traffic
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optax_mp

F32, BF16 = forms.F32, forms.BF16


@dataclass(frozen=True)
class Size:
    """The shape of a decoder and of its batch for each device."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int = 50304
    batch: int = 4
    length: int = 1024


SIZES = {
    "small": Size(4, 256, 1024, 4, 2048, 4, 128),
    "0.35B": Size(24, 1024, 4096, 16),
    "1.3B": Size(24, 2048, 8192, 16),
    "2.7B": Size(32, 2560, 10240, 32),
    "7B": Size(32, 4096, 16384, 32),
    # Eight devices have no whole blocks of these columns, and no equal share of words.
    "uneven": Size(24, 2048, 5504, 16, 50257),
}
LAYOUTS: dict[str, tuple[dict[str, int], PartitionSpec]] = {
    "rows": ({"data": 8}, PartitionSpec("data")),
    "columns": ({"data": 8}, PartitionSpec(None, "data")),
    "both": ({"data": 4, "model": 2}, PartitionSpec("data", "model")),
}
# What the backward pass keeps, besides what is carried from layer to layer.
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": jax.checkpoint_policies.everything_saveable,
}


# The model


def init(size: Size, dtype: str, *, is_unrolled: bool = False) -> Any:
    """Return params as descriptions: norms are float32, all else is in `dtype`."""
    make, width = jax.ShapeDtypeStruct, size.width
    products = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, size.hidden),
        "down": (size.hidden, width),
    }
    norms = ["attention norm", "mlp norm"]
    layer = {name: make((width,), F32) for name in norms}
    layer |= {name: make(shape, dtype) for name, shape in products.items()}
    if is_unrolled:
        layer |= {f"{name} bias": make((width,), F32) for name in norms}
        layer |= {
            f"{name} bias": make(shape[1:], dtype) for name, shape in products.items()
        }
        layers: Any = [layer] * size.layers
    else:
        layers = {
            name: make((size.layers, *x.shape), x.dtype) for name, x in layer.items()
        }
    return {
        "embedding": make((size.vocabulary, width), dtype),
        "layers": layers,
        "norm": make((width,), F32),
    }


def loss(
    params: Any,
    tokens: jax.Array,
    size: Size,
    dtype: str,
    remat: str,
    cut: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return the loss; products are in `dtype`, and `cut` shards a batch."""

    def norm(weights: Any, name: str, x: jax.Array) -> jax.Array:
        wide = x.astype(F32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(mean + 1e-6) * weights[name]
        return (wide + weights.get(f"{name} bias", 0)).astype(dtype)

    def product(weights: Any, name: str, x: jax.Array) -> jax.Array:
        y = x @ weights[name].astype(dtype)
        bias = weights.get(f"{name} bias")
        return y if bias is None else y + bias.astype(dtype)

    @functools.partial(jax.checkpoint, policy=REMAT[remat])
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        y = product(weights, "qkv", norm(weights, "attention norm", x))
        y = y.reshape(*y.shape[:2], 3, size.heads, -1)
        q, k, v = (y[:, :, i] for i in range(3))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = cut(x + product(weights, "out", y))
        y = product(weights, "up", norm(weights, "mlp norm", x))
        return cut(x + product(weights, "down", jax.nn.gelu(y))), None

    with jax.named_scope("lookup"):
        x = cut(params["embedding"].astype(dtype)[tokens[:, :-1]])
    if isinstance(params["layers"], list):
        for weights in params["layers"]:
            x, _ = layer(x, weights)
    else:
        # `lax.scan`, but for layers whose gradients are released.
        x, _ = optax_mp.scan_layers(layer, x, params["layers"])
    head = {"head": params["embedding"].T}
    logits = product(head, "head", norm(params, "norm", x)).astype(F32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def adamw(*, is_clipped: bool = True) -> optax.GradientTransformation:
    """Return AdamW as language models are trained by it."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 1000)
    decay = functools.partial(
        jax.tree_util.tree_map_with_path, lambda path, _: "norm" not in str(path)
    )

    def make(learning_rate: Any) -> optax.GradientTransformation:
        rule = optax.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=decay)
        clip = optax.clip_by_global_norm(1.0) if is_clipped else optax.identity()
        return optax.chain(clip, rule)

    return optax.inject_hyperparams(make)(learning_rate=rate)


# The forms


def masters_by_hand() -> optax.GradientTransformation:
    """Return float32 masters as a loop has them, as a transformation.

    Its update returns the new params themselves.
    """
    tx = adamw()

    def init(params: Any) -> Any:
        masters = optax_mp.cast_floating(params, jnp.float32)
        return masters, tx.init(masters)

    def update(grads: Any, state: Any, params: Any) -> Any:
        masters, inner = state
        grads = optax_mp.cast_floating(grads, jnp.float32)
        updates, inner = tx.update(grads, inner, masters)
        masters = optax.apply_updates(masters, updates)
        params = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params)
        return params, (masters, inner)

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class Form:
    """A way to train.

    Attributes:
        param_dtype: the dtype of params, but for norms.
        dtype: the dtype of products.
        make: makes the transformation.
        way: "tx.update", "by hand" or "release".
        amp: the dtype in which `amp` computes the loss, if it does.
        rules: its rules beside the default ones.
        max_norm: what `release_gradients` clips by, if it does.
        sums: what sums gradients over micro-batches: "scan" is a loop by hand, in
            float32; "refs" a scan whose backward pass adds in place; "optax" is
            `optax.microbatch` of gradients in the dtypes of params, "optax, float32" of
            float32 gradients.
    """

    param_dtype: str
    dtype: str
    make: Callable[[], optax.GradientTransformation]
    way: str = "tx.update"
    amp: str | None = None
    rules: dict[str, str] = field(default_factory=dict)
    max_norm: float | None = None
    sums: str = "scan"


OURS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "masters": lambda: forms.masters(adamw()),
    "Split(16)": lambda: forms.masters(adamw(), storage=optax_mp.Split(16)),
    "compact": lambda: forms.compact(adamw()),
}
FORMS = {
    "float32": Form(F32, F32, adamw),
    "float32 params, bf16 products": Form(F32, BF16, adamw),
    "masters by hand": Form(BF16, BF16, masters_by_hand, "by hand"),
}
FORMS |= {name: Form(BF16, BF16, make) for name, make in OURS.items()}
FORMS |= {
    f"{name}, loss scale": Form(BF16, BF16, lambda make=make: forms.scaled(make()))
    for name, make in OURS.items()
}
# The state is on the host but for the optimizer's step.
FORMS |= {
    f"{name}, offload": Form(BF16, BF16, lambda make=make: optax_mp.offload(make()))
    for name, make in OURS.items()
}
FORMS |= {
    "stochastic rounding, 8-bit state": Form(
        BF16,
        BF16,
        lambda: optax_mp.stochastic_rounding(optax_mp.low_bit_state(adamw())),
    ),
    "MultiSteps in compact": Form(
        BF16, BF16, lambda: forms.compact(optax.MultiSteps(adamw(), 4))
    ),
}
# No layer waits for the norm of all gradients.
FORMS |= {
    f"{name} unclipped{end}": Form(BF16, BF16, make, way)
    for name, make in {
        "masters": lambda: forms.masters(adamw(is_clipped=False)),
        "compact": lambda: forms.compact(adamw(is_clipped=False)),
    }.items()
    for end, way in {"": "tx.update", ", release": "release"}.items()
}
# Clipped in two passes; to be compared with "unclipped, release" and with the form.
FORMS |= {
    f"{name}, release": replace(FORMS[f"{name} unclipped, release"], max_norm=1.0)
    for name in ("masters", "compact")
}
# To be compared with "masters", all with `--micro 8`.
FORMS |= {
    f"sums by {sums}": replace(FORMS["masters"], sums=sums)
    for sums in ("optax", "optax, float32")
}
# To be compared with this form itself.
FORMS["sums by refs"] = replace(FORMS["float32 params, bf16 products"], sums="refs")
# To be compared with "float32 params, bf16 products" and "masters".
FORMS |= {
    f"amp bf16, {params} params": Form(
        dtype, F32, OURS["masters"] if dtype == BF16 else adamw, amp=BF16
    )
    for params, dtype in (("float32", F32), ("bf16", BF16))
}
# With these, layers add to bf16 values, as by hand; by default, to float32 ones.
FORMS |= {
    f"amp bf16, {params} params, lookup {rule}": replace(
        FORMS[f"amp bf16, {params} params"], rules={"lookup": rule}
    )
    for params, rule in (("float32", "rounded"), ("bf16", "low"))
}


# What is measured


def mesh_of(target: str, count: int, layout: str) -> tuple[Mesh, PartitionSpec]:
    """Return the devices, and how a matrix is sharded over them."""
    axes, spec = LAYOUTS[layout] if count > 1 else ({"data": 1}, PartitionSpec())
    devices = np.array(accelerators.devices_of(target, count))
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes)), spec


def measure(
    name: str,
    mesh: Mesh,
    spec: PartitionSpec,
    size: Size,
    remat: str,
    params: Any,
    micro: int = 1,
) -> record.Row:
    """Return what a step of a form needs, moves and sends."""
    # What other forms left would make this one's tracing cheaper.
    jax.clear_caches()
    step, args, grads = prepare(FORMS[name], params, mesh, spec, size, remat, micro)
    began = cpu_seconds()
    lowered = step.lower(*args)
    traced = cpu_seconds()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        return {"step": name, "peak GB": f"does not fit{needed_gb(str(error))}"}
    done = cpu_seconds()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    size_of_params = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    state = memory.argument_size_in_bytes - size_of_params / mesh.size
    return {
        "step": name,
        "state GB": state / 1e9,
        "gradients GB": grads / mesh.size / 1e9,
        "temporaries GB": memory.temp_size_in_bytes / 1e9,
        "peak GB": memory.peak_memory_in_bytes / 1e9,
        "moved GB": traffic.bytes_moved(text) / 1e9,
        "collectives": describe_collectives(text),
        "lowering s": traced - began,
        "compile s": done - traced,
    }


def cpu_seconds() -> float:
    """Return what this process used, with the assemblers that XLA called."""
    return sum(os.times()[:4])


def needed_gb(error: str) -> str:
    """Return what XLA says that a program needs, and has; it counts in 1024s."""
    found = re.search(r"([\d.]+)G\b\D*?([\d.]+)G\b", error)
    if found is None:
        return ""
    return ": {:.1f} of {:.1f}".format(
        *(float(x) * 2**30 / 1e9 for x in found.groups())
    )


def prepare(
    form: Form,
    params: Any,
    mesh: Mesh,
    spec: PartitionSpec,
    size: Size,
    remat: str,
    micro: int = 1,
) -> tuple[Any, Any, int]:
    """Return the step, its arguments, and the bytes of its gradients."""
    rows, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("data",), ()))
    shardings = jax.tree_util.tree_map_with_path(
        functools.partial(shard, mesh, spec), params
    )
    tx, state_shardings = form.make(), None
    if form.way == "release":
        state_shardings, tx = shardings_of_released(tx, params, shardings)
    elif form.way == "by hand":
        inner = optax_mp.state_shardings(adamw(), params, shardings)
        state_shardings = shardings, inner
    else:
        state_shardings = optax_mp.state_shardings(tx, params, shardings)
    fun = functools.partial(
        loss,
        size=size,
        dtype=form.dtype,
        remat=remat,
        cut=lambda x: jax.lax.with_sharding_constraint(x, rows),
    )
    if form.amp:
        rules = optax_mp.default_amp_rules | form.rules
        fun = optax_mp.amp(fun, compute_dtype=form.amp, rules=rules)

    gradients = summed(optax_mp.value_and_grad(fun), micro)
    if micro > 1 and form.sums == "refs":
        gradients = summed_in_place(fun, micro)
    elif micro > 1 and form.sums != "scan":
        gradients = accumulated(fun, micro, form.sums)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        if form.way == "release":
            return released(form, fun, params, state, tokens)
        value, grads = gradients(state, params, tokens)
        updates, state = tx.update(grads, state, params)
        is_new = form.way == "by hand"
        return (
            updates if is_new else optax.apply_updates(params, updates),
            state,
            value,
        )

    batch = size.batch * mesh.shape["data"] * micro
    tokens = jax.ShapeDtypeStruct((batch, size.length + 1), jnp.int32)
    args = params, jax.eval_shape(tx.init, params), tokens
    _, grads = jax.eval_shape(gradients, args[1], params, tokens)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        args,
        (shardings, state_shardings, rows),
    )
    out = shardings, state_shardings, whole
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    size_of_grads = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(grads))
    return jitted, placed, size_of_grads


def shardings_of_released(
    tx: optax.GradientTransformation, params: Any, shardings: Any
) -> tuple[Any, optax.GradientTransformation]:
    """Return how the states that `released` takes are sharded, and what makes them."""
    parts = [
        (tx._replace(init=jax.vmap(tx.init)), lambda tree: tree["layers"]),
        (tx, lambda tree: tree | {"layers": None}),
    ]

    def init(params: Any) -> Any:
        return tuple(tx.init(get(params)) for tx, get in parts)

    found = tuple(
        optax_mp.state_shardings(tx, get(params), get(shardings)) for tx, get in parts
    )
    return found, tx._replace(init=init)


def released(
    form: Form, fun: Callable[..., Any], params: Any, state: Any, tokens: jax.Array
) -> Any:
    """Return what a step does whose backward pass takes the steps of layers."""
    of_layers, of_rest = state
    rest, tx = params | {"layers": None}, form.make()
    value, grads, layers, of_layers = optax_mp.release_gradients(
        lambda layers, rest, tokens: fun(rest | {"layers": layers}, tokens),
        tx,
        max_norm=form.max_norm,
    )(of_layers, params["layers"], rest, tokens)
    updates, of_rest = tx.update(grads, of_rest, rest)
    rest = optax.apply_updates(rest, updates)
    return rest | {"layers": layers}, (of_layers, of_rest), value


def summed(gradients: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function that sums the gradients of some micro-batches in float32."""
    if count == 1:
        return gradients

    def in_turn(state: Any, params: Any, tokens: jax.Array) -> Any:
        def add(sums: Any, batch: jax.Array) -> Any:
            value, grads = gradients(state, params, batch)
            return jax.tree.map(lambda x, g: x + g.astype(F32), sums, grads), value

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, F32), params)
        batches = tokens.reshape(-1, count, tokens.shape[-1]).swapaxes(0, 1)
        sums, values = jax.lax.scan(add, zeros, batches)
        return values.mean(), sums

    return in_turn


def accumulated(fun: Callable[..., Any], count: int, sums: str) -> Callable[..., Any]:
    """Return the same by `optax.microbatch`."""

    def in_turn(state: Any, params: Any, tokens: jax.Array) -> Any:
        gradients = jax.value_and_grad(fun)
        if sums == "optax, float32":
            gradients = functools.partial(optax_mp.value_and_grad(fun), state)
        mean = optax.microbatching.AccumulationType.MEAN
        size = tokens.shape[0] // count
        return optax.microbatch(gradients, 1, size, mean)(params, tokens)

    return in_turn


def summed_in_place(fun: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return the same by references to the sums, which JAX adds to in place."""

    def in_turn(state: Any, params: Any, tokens: jax.Array) -> Any:
        def add(sums: Any, batch: jax.Array) -> Any:
            refs = jax.tree.map(lambda x: jax.new_ref(x), sums)
            value, pull = jax.vjp(lambda p: fun(p, batch), params)
            pull.with_refs(refs)(jnp.ones_like(value))
            return jax.tree.map(jax.freeze, refs), value

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, F32), params)
        batches = tokens.reshape(-1, count, tokens.shape[-1]).swapaxes(0, 1)
        sums, values = jax.lax.scan(add, zeros, batches)
        return values.mean(), sums

    return in_turn


def shard(mesh: Mesh, spec: PartitionSpec, path: Any, leaf: Any) -> NamedSharding:
    """Return the sharding of a param: norms are whole, stacked layers not cut."""
    stacked = (None,) * (len(leaf.shape) - 2)
    if "norm" in str(path) or "bias" in str(path):
        spec = PartitionSpec()
    elif any(
        name and size % mesh.shape[name]
        for name, size in zip(spec, leaf.shape[-2:], strict=False)
    ):
        spec = PartitionSpec(None, "data")  # words that do not divide
    return NamedSharding(mesh, PartitionSpec(*stacked, *spec) if spec else spec)


def describe_collectives(text: str) -> str:
    """Return how many collectives a program has, and the size of their results."""
    sizes: dict[str, list[int]] = {}
    for kind, size in traffic.collectives(text):
        if size > 4096:
            sizes.setdefault(kind, []).append(size)
    found = [f"{len(x)} {kind} ({sum(x) / 1e9:.2f} GB)" for kind, x in sizes.items()]
    return ", ".join(sorted(found)) or "none"


def add_compile_ratio(rows: list[record.Row]) -> None:
    """Give the last row its compile time over float32's, if both compiled."""

    def seconds(row: record.Row) -> float:
        return row["lowering s"] + row["compile s"]

    first, last = rows[0], rows[-1]
    if first["step"] == "float32" and "compile s" in first and "compile s" in last:
        last["compile ratio"] = seconds(last) / seconds(first)


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    targets = ",".join(accelerators.TARGETS)
    parser.add_argument("--targets", default=targets, help="some of them")
    parser.add_argument("--devices", default="1,8", help="how many")
    parser.add_argument("--layouts", default="rows", help="some, separated by ;")
    parser.add_argument("--remat", default="full", help=f"some of {', '.join(REMAT)}")
    parser.add_argument("--micro", type=int, default=1, help="batches in a step")
    parser.add_argument("--unrolled", action="store_true", help="layers in a list")
    parser.add_argument("--forms", default="", help="some, by how their names begin")
    record.add_option(parser)
    args = parser.parse_args()
    size, starts = SIZES[args.size], tuple(args.forms.split(";"))
    names = [name for name in FORMS if name.startswith(starts)]
    tables: record.Tables = {}
    for target, count, layout, remat in itertools.product(
        args.targets.split(","),
        map(int, args.devices.split(",")),
        args.layouts.split(";"),
        args.remat.split(","),
    ):
        title = f"{args.size}{', unrolled' if args.unrolled else ''}, remat {remat}"
        title += f", {args.micro} micro-batches" if args.micro > 1 else ""
        title += f", {count} x {target}"
        title += f", sharded by {layout}" if count > 1 else ""
        place = mesh_of(target, count, layout)
        small = replace(size, layers=1, width=256, hidden=256, heads=2)
        # The first program that is compiled pays for what all need.
        measure("float32", *place, small, remat, init(small, F32))
        rows = tables.setdefault(title, [])
        for name in names:
            params = init(size, FORMS[name].param_dtype, is_unrolled=args.unrolled)
            rows.append(measure(name, *place, size, remat, params, args.micro))
            add_compile_ratio(rows)
            print(title, rows[-1], flush=True)
            # At once, so that an interrupted run keeps what it has.
            record.finish(
                args.json, tables, accelerators.MACHINE, accelerators.PACKAGES
            )
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")


if __name__ == "__main__":
    main()
