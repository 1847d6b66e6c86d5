"""Whole training steps of a language model, compiled for TPUs and GPUs not here.

    python benchmarks training_step --size small      # in minutes
    python benchmarks training_step --json FILE       # all tables; goes on where it was
    python benchmarks training_step --tables "1.3B on one v5e" --forms compact

A decoder whose layers are stacked and scanned, with float32 norms; layers are computed
again in the backward pass. The step is forward, backward, clipping by the global norm,
AdamW with a decay mask and a schedule. Nothing is run: `pip install --group
accelerators` brings the compilers. On eight devices params, state and batch are sharded
by rows (FSDP), or params are whole and the state is sharded (zero1).

Gigabytes are per device. "peak" is the most that the step holds at once, by XLA: of
params, state, batch and temporaries, in which the gradients are. "moved" is to and
from its main memory. Collectives are of more than 4 KiB, with the gigabytes of their
results; those in the scan over layers count once. A program that XLA finds too
large for the device has a row that says so.

"optimizer GB" is what the optimizer's step moves, compiled by itself. "share" is the
time of these bytes at the peak of the memory, over this time and that of the model's
products at the peak of the chip, for the tokens of this batch and for 16 times as many.
Real steps reach neither peak.

"lowering s" and "compile s" are CPU seconds of all threads and of the assemblers that
XLA calls, the former with tracing.
"""

import argparse
import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# First: it tells JAX that no hardware is to be looked for.
import accelerators
import fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_forms as forms
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

    @property
    def tokens(self) -> int:
        """The tokens that a device sees in a step."""
        return self.batch * self.length

    @property
    def flops(self) -> float:
        """The operations of a device's products in a step.

        Two for each weight and token in the forward pass, and for half of the pairs of
        tokens in attention; twice as many in the backward pass, and those of the layers
        once again where it computes them again.
        """
        width, hidden = self.width, self.hidden
        layer = 2 * (4 * width**2 + 2 * width * hidden) + 2 * self.length * width
        head = 2 * width * self.vocabulary
        return self.tokens * (4 * self.layers * layer + 3 * head)


SIZES = {
    "small": Size(4, 256, 1024, 4, 2048, 4, 128),
    "1.3B": Size(24, 2048, 8192, 16),
    "7B": Size(32, 4096, 16384, 32),
}
# Operations a second in bfloat16, and bytes a second of the main memory: of the data
# sheets of the H100 SXM and of Cloud TPU v5e.
PEAKS = {"H100": (989e12, 3.35e12), "v5e": (197e12, 0.819e12)}
SPECS = {"": PartitionSpec(), "zero1": PartitionSpec(), "FSDP": PartitionSpec("data")}


# The model


def init(size: Size, dtype: str) -> Any:
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
    layers = {name: make((size.layers, *x.shape), x.dtype) for name, x in layer.items()}
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
    cut: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return the loss; products are in `dtype`, and `cut` shards a batch."""

    def norm(weights: Any, name: str, x: jax.Array) -> jax.Array:
        wide = x.astype(F32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + 1e-6) * weights[name]).astype(dtype)

    def product(weights: Any, name: str, x: jax.Array) -> jax.Array:
        return x @ weights[name].astype(dtype)

    @jax.checkpoint
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
    # `lax.scan`, except where the gradients of layers are released.
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
    rule = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=decay)
    return optax.chain(optax.clip_by_global_norm(1.0), rule) if is_clipped else rule


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
        make: makes the transformation.
        param_dtype: the dtype of params, except norms.
        way: "tx.update", "by hand" or "release".
        amp: the rules of `amp` beside its own, if it computes the loss.
    """

    make: Callable[[], optax.GradientTransformation]
    param_dtype: str = BF16
    way: str = "tx.update"
    amp: dict[str, str] | None = None


def released_masters() -> optax.GradientTransformation:
    """Return masters that `release_gradients` clips."""
    return forms.masters(adamw(is_clipped=False))


def released_compact() -> optax.GradientTransformation:
    """Return the compact form that `release_gradients` clips."""
    return forms.compact(adamw(is_clipped=False))


FORMS = {
    "float32 params": Form(adamw, F32),
    "masters by hand": Form(masters_by_hand, way="by hand"),
    "masters": Form(lambda: forms.masters(adamw())),
    "masters, loss scale": Form(lambda: forms.scaled(forms.masters(adamw()))),
    "Split(16)": Form(lambda: forms.masters(adamw(), storage=optax_mp.Split(16))),
    "compact": Form(lambda: forms.compact(adamw())),
    "compact, loss scale": Form(lambda: forms.scaled(forms.compact(adamw()))),
    "masters, release": Form(released_masters, way="release"),
    "compact, release": Form(released_compact, way="release"),
    # To be compared with "float32 params". By default amp looks rows up in the dtype of
    # the embedding, and layers then add to float32 values.
    "amp bf16": Form(adamw, F32, amp={}),
    "amp bf16, lookup rounded": Form(adamw, F32, amp={"lookup": "rounded"}),
}


@dataclass(frozen=True)
class Table:
    """Which steps a table holds.

    Attributes:
        size: of the decoder.
        target: for which device they are compiled.
        forms: the names of the forms.
        layout: "" for one device; "FSDP" or "zero1" over eight.
    """

    size: str
    target: str
    forms: tuple[str, ...]
    layout: str = ""

    @property
    def title(self) -> str:
        """The title."""
        count = f"eight {self.target}, {self.layout}" if self.layout else self.target
        return f"{self.size} on {count if self.layout else f'one {count}'}"


SHARDED = "masters by hand", "masters", "compact"
TABLES = (
    Table("1.3B", "H100", tuple(FORMS)),
    Table("1.3B", "H100", ("masters", "compact"), "zero1"),
    Table("1.3B", "H100", (*SHARDED, "compact, release"), "FSDP"),
    Table("7B", "H100", SHARDED, "FSDP"),
    Table("1.3B", "v5e", ("float32 params", "masters", "compact", "compact, release")),
    Table("1.3B", "v5e", ("masters", "compact"), "FSDP"),
)


# What is measured


def measure(name: str, size: Size, target: str, layout: str) -> record.Row:
    """Return what a step of a form needs, moves and sends."""
    # What other forms left would make this one's tracing cheaper.
    jax.clear_caches()
    count = accelerators.COUNT if layout else 1
    mesh = Mesh(np.array(accelerators.devices_of(target, count)), ("data",))
    programs = prepare(FORMS[name], size, mesh, layout)
    began = cpu_seconds()
    lowered = programs.step.lower(*programs.args)
    traced = cpu_seconds()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        return {"step": name, "peak GB": f"does not fit{needed_gb(str(error))}"}
    done = cpu_seconds()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    params, _, _ = programs.args
    row = {
        "step": name,
        "state GB": memory.argument_size_in_bytes / 1e9 - gigabytes(params),
        "temporaries GB": memory.temp_size_in_bytes / 1e9,
        "peak GB": memory.peak_memory_in_bytes / 1e9,
        "moved GB": traffic.bytes_moved(text) / 1e9,
    }
    if programs.optimizer is not None:
        alone = programs.optimizer.lower(*programs.args[:2], programs.grads).compile()
        moved = traffic.bytes_moved(alone.as_text())
        flops, bandwidth = PEAKS[target]
        row["optimizer GB"] = moved / 1e9
        for times in (1, 16):
            rest = times * size.flops / flops
            share = moved / bandwidth / (moved / bandwidth + rest)
            row[f"share at {times * size.tokens // 1024}k tokens"] = f"{share:.1%}"
    if layout:
        row["collectives"] = describe_collectives(text)
    return row | {"lowering s": traced - began, "compile s": done - traced}


def gigabytes(tree: Any) -> float:
    """Return how large described arrays are on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize / 1e9
        for x in jax.tree.leaves(tree)
    )


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


@dataclass(frozen=True)
class Programs:
    """What is compiled, and for which arguments.

    Attributes:
        step: the whole step.
        optimizer: the optimizer's step alone, if it is one.
        args: params, state and tokens.
        grads: the gradients.
    """

    step: Any
    optimizer: Any
    args: tuple[Any, Any, Any]
    grads: Any


def prepare(form: Form, size: Size, mesh: Mesh, layout: str) -> Programs:
    """Return the programs of a form over the devices of a mesh."""
    rows, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("data",), ()))
    params = init(size, form.param_dtype)
    shardings = jax.tree_util.tree_map_with_path(
        functools.partial(shard, mesh, SPECS[layout]), params
    )
    tx = form.make()
    if layout == "zero1":
        tx = optax_mp.zero1(tx, mesh, "data")
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
        dtype=F32 if form.amp is not None else BF16,
        cut=lambda x: jax.lax.with_sharding_constraint(x, rows),
    )
    if form.amp is not None:
        rules = optax_mp.default_amp_rules | form.amp
        fun = optax_mp.amp(fun, compute_dtype=BF16, rules=rules)
    gradients = optax_mp.value_and_grad(fun)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        is_new = form.way == "by hand"
        return updates if is_new else optax.apply_updates(params, updates), state

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        if form.way == "release":
            return released(form, fun, params, state, tokens)
        value, grads = gradients(state, params, tokens)
        return *update(params, state, grads), value

    batch = size.batch * mesh.size
    tokens = jax.ShapeDtypeStruct((batch, size.length + 1), jnp.int32)
    args = params, jax.eval_shape(tx.init, params), tokens
    args = accelerators.place(args, (shardings, state_shardings, rows))
    kept = shardings, state_shardings
    return Programs(
        jax.jit(step, donate_argnums=(0, 1), out_shardings=(*kept, whole)),
        None
        if form.way == "release"
        else jax.jit(update, donate_argnums=(0, 1), out_shardings=kept),
        args,
        accelerators.place(params, shardings),  # their gradients look like them
    )


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
        max_norm=1.0,
    )(of_layers, params["layers"], rest, tokens)
    updates, of_rest = tx.update(grads, of_rest, rest)
    rest = optax.apply_updates(rest, updates)
    return rest | {"layers": layers}, (of_layers, of_rest), value


def shard(mesh: Mesh, spec: PartitionSpec, path: Any, leaf: Any) -> NamedSharding:
    """Return the sharding of a param: norms are whole, stacked layers not cut."""
    if "norm" in str(path) or not spec:
        return NamedSharding(mesh, PartitionSpec())
    stacked = (None,) * (len(leaf.shape) - 2)
    return NamedSharding(mesh, PartitionSpec(*stacked, *spec))


def describe_collectives(text: str) -> str:
    """Return how many collectives a program has, and the size of their results."""
    sizes: dict[str, list[int]] = {}
    for kind, size in traffic.collectives(text):
        if size > 4096:
            sizes.setdefault(kind, []).append(size)
    found = [f"{len(x)} {kind} ({sum(x) / 1e9:.2f} GB)" for kind, x in sizes.items()]
    return ", ".join(sorted(found)) or "none"


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, help="in place of each table's own")
    parser.add_argument("--tables", default="", help="some, by how titles begin")
    parser.add_argument("--forms", default="", help="some, by how their names begin")
    record.add_option(parser)
    args = parser.parse_args()
    titles, starts = (tuple(x.split(";")) for x in (args.tables, args.forms))
    tables = fingerprints.fresh_tables(args.json)
    for table in (x for x in TABLES if x.title.startswith(titles)):
        size = SIZES[args.size or table.size]
        rows = tables.setdefault(table.title, [])
        done = [row["step"] for row in rows]
        for name in (x for x in table.forms if x.startswith(starts) and x not in done):
            rows.append(measure(name, size, table.target, table.layout))
            print(table.title, rows[-1], flush=True)
            # At once, so that an interrupted run keeps what it has.
            record.finish(
                args.json, tables, accelerators.MACHINE, accelerators.PACKAGES
            )
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")


if __name__ == "__main__":
    main()
